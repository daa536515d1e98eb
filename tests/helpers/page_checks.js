// Checks of a page as it is drawn.

/** Everything that is wrong. */
function drawnWrong() {
  const root = document.documentElement;
  const wide = root.scrollWidth > root.clientWidth ? ["the page scrolls sideways"] : [];
  return [...wide, ...cutOff(), ...outsideFigures()];
}

/** Boxes that stick out of the page's width, except those in a box that scrolls by itself. */
function cutOff() {
  return [...document.querySelectorAll("body *")].filter(e => {
    const box = e.getBoundingClientRect();
    if (!box.width || (box.right <= innerWidth + 1 && box.left >= -1)) return false;
    for (let up = e.parentElement; up; up = up.parentElement)
      if (["auto", "scroll", "hidden"].includes(getComputedStyle(up).overflowX)) return false;
    return true;
  }).map(e => "cut off: " + e.tagName + " " + e.textContent.slice(0, 40));
}

/** Texts of figures that leave their figure. */
function outsideFigures() {
  return [...document.querySelectorAll("svg")].flatMap(svg => {
    const all = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter(text => {
      const box = text.getBoundingClientRect();
      return box.left < all.left - 1 || box.right > all.right + 1 || box.top < all.top - 1 || box.bottom > all.bottom + 1;
    }).map(text => "outside its figure: " + text.textContent);
  });
}
