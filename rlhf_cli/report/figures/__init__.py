"""The page's figures, drawn by matplotlib into the page itself. matplotlib is imported when the first one is drawn."""
