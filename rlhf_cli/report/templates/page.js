// The page without this script is whole: it adds orders, filters and search, values on hover, CSV, and marked words.
"use strict";

const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const byId = (id) => document.getElementById(id);
const text = (value) => {
  const size = Math.abs(value);
  const digits = size >= 999.5 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(size < 1e-3 ? 2 : 3));
  return digits.replace("-", "\u2212");
};

/** What the page carries compressed: {judges, policies, prompts, figures}. */
async function readData() {
  const bytes = Uint8Array.from(atob(byId("data").content.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

// Tables that can be searched

function searchTable(place) {
  const line = place.querySelector(".search");
  const rows = all("[data-row]", place);
  const texts = rows.map((row) => row.textContent.toLowerCase());
  line.hidden = false;
  line.querySelector("input").addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase().trim();
    rows.forEach((row, index) => (row.hidden = !texts[index].includes(wanted)));
    const found = rows.filter((row) => !row.hidden).length;
    line.querySelector("output").textContent = wanted ? `${found} of ${rows.length}` : "";
  });
}

// Figures: the value under the pointer, or of the arrow keys; a logarithmic scale; CSV

function showValues(svg) {
  const spots = all(".spot", svg);
  if (!spots.length) return;
  const readout = document.createElement("output");
  readout.className = "readout";
  svg.after(readout);
  let shown = -1;

  const show = (index) => {
    spots[shown]?.classList.remove("shown");
    shown = index;
    spots[shown]?.classList.add("shown");
    readout.textContent = spots[shown]?.textContent ?? "";
  };
  svg.addEventListener("pointermove", (event) => {
    const distances = spots.map((spot) => {
      const box = spot.getBoundingClientRect();
      return Math.hypot(box.x + box.width / 2 - event.clientX, (box.y + box.height / 2 - event.clientY) / 2);
    });
    show(distances.indexOf(Math.min(...distances)));
  });
  svg.addEventListener("pointerleave", () => show(-1));
  if (svg.closest("a")) return;
  svg.tabIndex = 0;
  svg.addEventListener("blur", () => show(-1));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    show(Math.min(spots.length - 1, Math.max(0, shown + step)));
  });
}

function addFigureTools(figure, table) {
  const tools = document.createElement("p");
  tools.className = "figure-tools";
  const button = (label, action) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = label;
    made.addEventListener("click", () => action(made));
    tools.append(made);
  };
  const logarithmic = figure.querySelector("div[hidden]");
  if (logarithmic) {
    const linear = document.createElement("div");
    logarithmic.before(linear);
    linear.append(...all(":scope > svg, :scope > .readout", figure));
    button("log scale", (made) => {
      logarithmic.hidden = !logarithmic.hidden;
      linear.hidden = !logarithmic.hidden;
      made.textContent = logarithmic.hidden ? "log scale" : "linear scale";
    });
  }
  const title = figure.querySelector("figcaption").firstChild.textContent.trim();
  if (table) button("CSV", () => download(`${figure.dataset.figure.replace(/\W+/g, "-")}.csv`, table));
  all("button", tools).forEach((made) => made.setAttribute("aria-label", `${made.textContent} of ${title}`));
  if (tools.childElementCount) figure.append(tools);
}

function download(name, table) {
  const cell = (value) => (/[",\n]/.test(value ?? "") ? `"${value.replaceAll('"', '""')}"` : (value ?? ""));
  const lines = table.map((row) => row.map(cell).join(",")).join("\n");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([lines + "\n"], { type: "text/csv" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

// Tokens: the value of the one under the pointer, or that was tapped

function tokenReadout(strip) {
  const readout = Object.assign(element("output", "Point at a token for its value."), { className: "readout" });
  const show = ({ target }) => target !== strip && (readout.textContent = `${target.textContent}: ${target.title}`);
  strip.addEventListener("pointerover", show);
  strip.addEventListener("click", show);
  return readout;
}

// Answers: which prompts are shown, in which order

const FIRST = 10;
const PAGE = 50;

/** A prompt with the answers of two policies, and what it is sorted by. */
function compared(prompt, left, right, judge) {
  const [first, second] = [prompt.answers[left], prompt.answers[right]];
  if (!first || !second) return null;
  const gains = second.scores.map((score, place) => (score === null || first.scores[place] === null ? null : score - first.scores[place]));
  const signs = gains.filter((gain) => gain !== null).map(Math.sign);
  return { prompt, first, second, gains, gain: gains[judge], disagree: signs.includes(1) && signs.includes(-1), cut: !first.ended || !second.ended };
}

/** The distance between the highest and the lowest gain of the judges, each in units of that judge's spread. */
function disagreement(rows) {
  const judges = rows[0]?.gains.map((_, place) => place) ?? [];
  const spreads = judges.map((judge) => Math.sqrt(rows.reduce((sum, row) => sum + (row.gains[judge] ?? 0) ** 2, 0) / rows.length) || 1);
  return (row) => {
    const gains = row.gains.map((gain, judge) => (gain ?? 0) / spreads[judge]);
    return Math.max(...gains) - Math.min(...gains);
  };
}

const ORDERS = {
  gain: () => (row) => row.gain ?? -Infinity,
  loss: () => (row) => -(row.gain ?? Infinity),
  score: (judge) => (row) => row.second.scores[judge] ?? -Infinity,
  low: (judge) => (row) => -(row.second.scores[judge] ?? Infinity),
  length: () => (row) => row.second.length,
  kl: () => (row) => row.second.kl ?? -Infinity,
  disagreement: (_, rows) => disagreement(rows),
  number: () => (row) => -row.prompt.index,
};
const OUTCOMES = {
  win: (row) => row.gain > 0,
  lose: (row) => row.gain < 0,
  tie: (row) => row.gain === 0,
  cut: (row) => row.cut,
  disagree: (row) => row.disagree,
};

const ORDER_OF = { win: "gain", lose: "loss" };

/** Whether a prompt or an answer of any policy has a text, and how many answers have it. */
function find(prompt, wanted) {
  const has = (words) => words.toLowerCase().includes(wanted);
  const answers = wanted ? prompt.answers.filter((answer) => answer && has(answer.text)).length : 0;
  return { answers, found: answers > 0 || [prompt.prompt, ...Object.values(prompt.columns)].some(has) };
}

/** Marks a text where it is shown. */
function highlight(wanted) {
  if (!window.Highlight) return;
  const ranges = wanted ? all("#pairs .text").flatMap((part) => rangesOf(wanted, part)) : [];
  CSS.highlights.set("found", new Highlight(...ranges));
}

function rangesOf(wanted, part) {
  const walker = document.createTreeWalker(part, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  const whole = part.textContent.toLowerCase();
  if (whole.length !== part.textContent.length) return []; // letters whose lower case is longer

  const placeOf = (offset) => {
    let before = 0;
    for (const node of nodes) {
      if (offset <= before + node.length) return [node, offset - before];
      before += node.length;
    }
  };
  const ranges = [];
  for (let start = whole.indexOf(wanted); start >= 0; start = whole.indexOf(wanted, start + wanted.length)) {
    const range = new Range();
    range.setStart(...placeOf(start));
    range.setEnd(...placeOf(start + wanted.length));
    ranges.push(range);
  }
  return ranges;
}

function showAnswers(data) {
  const pairs = byId("pairs");
  const wanted = () => byId("find").value.toLowerCase().trim();
  let order = "gain";
  let rows = [];
  let drawn = 0;

  function select() {
    const [judge, left, right] = ["judge", "left", "right"].map((id) => Number(byId(id).value));
    const columns = all("[data-column]").filter((box) => box.value);
    const outcome = OUTCOMES[byId("outcome").value] ?? (() => true);
    const compare = (prompt) => compared(prompt, left, right, judge);
    const everyone = data.prompts.map(compare).filter(Boolean);
    const key = ORDERS[order](judge, everyone);
    rows = everyone
      .map((row) => ({ ...row, ...find(row.prompt, wanted()) }))
      .filter(({ found }) => found)
      .filter(({ prompt }) => columns.every((box) => prompt.columns[box.dataset.column] === box.value))
      .filter(outcome)
      .map((row) => ({ ...row, key: key(row) }))
      .sort((one, other) => other.key - one.key || one.prompt.index - other.prompt.index);
    pairs.replaceChildren();
    drawn = 0;
    drawMore();
  }

  function drawMore() {
    const names = [byId("left"), byId("right")].map((box) => box.selectedOptions[0].textContent);
    const options = { judges: data.judges, judge: Number(byId("judge").value), names, marked: byId("diff").checked };
    const next = rows.slice(drawn, drawn ? drawn + PAGE : FIRST);
    pairs.append(...next.map((row) => drawPair(row, options, data)));
    drawn += next.length;
    byId("more").hidden = drawn === rows.length;
    const answers = rows.reduce((sum, row) => sum + row.answers, 0);
    const inAnswers = wanted() ? `; ${answers} answers have the text, of all ${data.policies.length} versions` : "";
    byId("found").textContent = rows.length ? `${drawn} of ${rows.length} prompts shown${inAnswers}` : "No prompt is left: change the filters.";
    highlight(wanted());
    all("#tools [data-order]").forEach((button) => button.setAttribute("aria-pressed", button.dataset.order === order));
  }

  all("[data-order]").forEach((control) =>
    control.addEventListener("click", (event) => {
      order = control.dataset.order;
      byId("judge").value = control.matches("a") ? "0" : byId("judge").value;
      select();
      if (!control.matches("a")) return;
      event.preventDefault();
      byId("answers").scrollIntoView();
      all(`#tools [data-order=${order}]`)[0].focus({ preventScroll: true });
    }),
  );
  byId("outcome").addEventListener("input", (event) => (order = ORDER_OF[event.target.value] ?? order));
  pairs.addEventListener("toggle", () => setTimeout(() => highlight(wanted())), true); // after the folded answers are drawn
  byId("tools").hidden = false;
  byId("filters").open = matchMedia("(min-width: 40rem)").matches;
  byId("tools").addEventListener("input", select);
  byId("more").addEventListener("click", drawMore);
  select();
}

// Answers: one prompt

function drawPair(row, { judges, judge, names, marked }, data) {
  const pair = byId("pair-form").content.cloneNode(true).firstElementChild;
  const { prompt, first, second, gain, gains } = row;
  pair.querySelector(".number").textContent = prompt.index;
  const result = pair.querySelector(".gain");
  const gainText = (place) => `${judges[place]} ${gains[place] > 0 ? "+" : ""}${text(gains[place])}`;
  const known = judges.map((_, place) => place).filter((place) => gains[place] !== null);
  if (known.includes(judge)) {
    result.textContent = gainText(judge);
    result.classList.add(gain > 0 ? "won" : gain < 0 ? "lost" : "tied");
  }
  const others = known.filter((place) => place !== judge);
  pair.querySelector(".others").textContent = others.map((place) => `, ${gainText(place)}`).join("");
  pair.querySelector(".prompt").textContent = prompt.prompt;
  const columns = pair.querySelector(".columns-read");
  const values = Object.entries(prompt.columns).map(([name, value]) => `${name}: ${value}`);
  columns.hidden = !values.length;
  columns.textContent = `Data: ${values.join(", ")}`;

  const parts = marked ? differences(first.text, second.text) : [[[first.text]], [[second.text]]];
  [first, second].forEach((answer, side) => {
    all(".policy", pair)[side].textContent = names[side];
    all(".facts-of", pair)[side].textContent = factsOf(answer, judges);
    all(".answer", pair)[side].append(...parts[side].map(([words, tag]) => (tag ? element(tag, words) : words)));
  });
  if (second.tokens) pair.append(tokenView(second.tokens, names[1]));
  if (prompt.answers.filter(Boolean).length > 2) pair.append(course(prompt, data, row.answers));
  return pair;
}

function factsOf(answer, judges) {
  const scores = judges.map((judge, place) => `${judge} ${answer.scores[place] === null ? "-" : text(answer.scores[place])}`);
  const kl = answer.kl === null || answer.kl === 0 ? [] : [`KL ${text(answer.kl)}`];
  return [...scores, `${answer.length} tokens`, ...kl, ...(answer.ended ? [] : ["cut off"])].join(", ");
}

function element(tag, content) {
  const made = document.createElement(tag);
  made.textContent = content;
  return made;
}

function folded(title, draw) {
  const details = document.createElement("details");
  details.append(element("summary", title));
  details.addEventListener("toggle", () => details.childElementCount === 1 && details.append(...draw()));
  return details;
}

/** The answers of all policies to one prompt: SFT, the snapshots in their order, PPO, then the others. */
function course(prompt, data, found) {
  const given = prompt.answers.map((answer, place) => [answer, data.policies[place]]).filter(([answer]) => answer);
  return folded(`All ${given.length} answers to this prompt${found ? `, ${found} with the text` : ""}`, () =>
    given.flatMap(([answer, name]) => {
      const title = element("h4", `${name} `);
      title.append(Object.assign(element("span", factsOf(answer, data.judges)), { className: "muted" }));
      const words = Object.assign(element("p", answer.text), { className: "text", dir: "auto" });
      return [title, words];
    }),
  );
}

function tokenView(tokens, name) {
  const top = Math.max(...tokens.kl.map(Math.abs)) || 1;
  return folded(`${name}, token by token`, () => {
    const about = element("p", `Log-ratio of each token: its log-probability by ${name} minus that by SFT, in nats. Blue: likelier by ${name}.`);
    const strip = Object.assign(document.createElement("p"), { className: "strip", dir: "auto" });
    tokens.text.forEach((token, place) => {
      const shown = element("span", token || "\u00b7");
      shown.className = tokens.kl[place] < 0 ? "minus" : "plus";
      shown.style.setProperty("--a", Math.abs(tokens.kl[place]) / top);
      shown.title = text(tokens.kl[place]);
      strip.append(shown);
    });
    return [about, strip, tokenReadout(strip)];
  });
}

// Words that differ: those outside the longest common subsequence

const MOST_WORDS = 400;

/** The parts of both texts: [text, tag], with the tag of words that only one text has. */
function differences(left, right) {
  const [one, other] = [left, right].map((whole) => whole.match(/\s*\S+|\s+$/g) ?? []);
  const same = (i, j) => one[i].trim() === other[j].trim();
  if (one.length > MOST_WORDS || other.length > MOST_WORDS) return [[[left]], [[right]]];
  const common = Array.from({ length: one.length + 1 }, () => new Uint16Array(other.length + 1));
  for (let i = one.length - 1; i >= 0; i--)
    for (let j = other.length - 1; j >= 0; j--)
      common[i][j] = same(i, j) ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);

  const parts = [[], []];
  const add = (side, word, tag) => {
    const last = parts[side].at(-1);
    if (last && last[1] === tag) last[0] += word;
    else if (tag) parts[side].push([word.match(/^\s*/)[0]], [word.trimStart(), tag]);
    else parts[side].push([word]);
  };
  let [i, j] = [0, 0];
  while (i < one.length || j < other.length) {
    if (i < one.length && j < other.length && same(i, j)) {
      add(0, one[i++]);
      add(1, other[j++]);
    } else if (j === other.length || (i < one.length && common[i + 1][j] >= common[i][j + 1])) add(0, one[i++], "del");
    else add(1, other[j++], "ins");
  }
  return parts;
}

all("[data-search]").forEach(searchTable);
all("svg.figure").forEach(showValues);
readData().then((found) => {
  all("[data-figure]").forEach((figure) => addFigureTools(figure, found.figures[figure.dataset.figure]));
  if (byId("pair-form")) showAnswers(found);
  if (location.hash) byId(location.hash.slice(1))?.scrollIntoView(); // what is above has changed its height
});
all(".strip").forEach((strip) => strip.after(tokenReadout(strip)));
all(".multiples a").forEach((link) => link.addEventListener("click", () => (byId("folded").open = true)));
