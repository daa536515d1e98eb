"""Memory, time and placement of a stage on a machine, computed before anything is loaded."""
