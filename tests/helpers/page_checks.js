// Checks of a page as it is drawn; each returns what is wrong.

/** Boxes that stick out of the page's width, except those in a box that scrolls by itself. */
function cutOff() {
  return [...document.querySelectorAll("body *")].filter(e => {
    const box = e.getBoundingClientRect();
    if (!box.width || (box.right <= innerWidth + 1 && box.left >= -1)) return false;
    for (let up = e.parentElement; up; up = up.parentElement)
      if (["auto", "scroll", "hidden"].includes(getComputedStyle(up).overflowX)) return false;
    return true;
  }).map(e => e.tagName + " " + e.textContent.slice(0, 40));
}

/** Texts of figures that leave their figure. */
function outsideFigures() {
  return [...document.querySelectorAll("svg")].flatMap(svg => {
    const all = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter(text => {
      const box = text.getBoundingClientRect();
      return box.left < all.left - 1 || box.right > all.right + 1 || box.top < all.top - 1 || box.bottom > all.bottom + 1;
    }).map(text => text.textContent);
  });
}

/** Texts whose contrast with their background is below 4.5, by WCAG 2.1. */
function lowContrast() {
  const numbers = color => color.match(/[\d.]+/g).map(Number);
  const luminance = color => {
    const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = numbers(color).map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = e => {
    for (; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor, parts = numbers(color);
      if (parts.length < 4 || parts[3] === 1) return color;
    }
    return "rgb(255, 255, 255)";
  };
  return [...document.querySelectorAll("p, td, th, li, h1, h2, h3, summary, dt, dd")].filter(e => {
    if (!e.innerText || !e.getBoundingClientRect().width) return false;
    const [low, high] = [getComputedStyle(e).color, background(e)].map(luminance).sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05) < 4.5;
  }).map(e => e.tagName + " " + e.innerText.slice(0, 40));
}
