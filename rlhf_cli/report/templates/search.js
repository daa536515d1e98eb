document.querySelectorAll("[data-search]").forEach((place) => {
  const line = place.querySelector(".search");
  const rows = [...place.querySelectorAll("[data-row]")];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  line.hidden = false;
  line.querySelector("input").addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase().trim();
    let found = 0;
    rows.forEach((row, index) => {
      row.hidden = !texts[index].includes(wanted);
      found += row.hidden ? 0 : 1;
    });
    line.querySelector("output").textContent = wanted ? `${found} of ${rows.length}` : "";
  });
});
