// Runs the script of page.html against a server, with as much of a document as it uses: node label_page.js PAGE ADDRESS
"use strict";
const fs = require("fs");
const [, , file, address] = process.argv;
const html = fs.readFileSync(file, "utf-8");

class Element {
  constructor(name) {
    Object.assign(this, {nodeName: name.toUpperCase(), children: [], attributes: {}, listeners: {}, dataset: {}, value: ""});
    this.classes = new Set();
    this.classList = {add: each => this.classes.add(each), remove: each => this.classes.delete(each)};
  }
  append(...parts) { this.children.push(...parts); }
  replaceChildren(...parts) { this.children = parts; }
  get firstChild() { return this.children[0]; }
  get textContent() { return this.children.map(each => each.textContent ?? each).join(""); }
  set textContent(text) { this.children = [text]; }
  setAttribute(name, value) { this.attributes[name] = value; }
  getAttribute(name) { return this.attributes[name]; }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  focus() { document.focused = this; }
  showModal() { this.open = true; }
  outline() {
    const parts = this.children.filter(each => each !== "").map(each => each.outline ? each.outline() : JSON.stringify(each));
    return `${this.nodeName.toLowerCase()}(${parts.join(" ")})`;
  }
}

const known = {};
for (const [, name] of html.matchAll(/\bid="([\w-]+)"/g)) known[name] = new Element("div");
known.shortcuts.checked = true;
const choices = [...html.matchAll(/data-choice="(\w+)"/g)].map(([, choice]) => {
  const button = new Element("button");
  button.dataset.choice = choice;
  return button;
});
const cards = [new Element("section"), new Element("section")];
global.document = Object.assign(new Element("document"), {
  hidden: false,
  getElementById: name => known[name],
  createElement: name => new Element(name),
  querySelectorAll: selector => selector === ".answer" ? cards : choices,
});
global.location = new URL(address);
const now = performance.now.bind(performance);
let later = 0;
performance.now = () => now() + later;
let base = address;
global.scrollTo = () => {};
const fetchPage = fetch;
let requests = 0;
global.fetch = async (path, options) => {
  requests++;
  const answer = await fetchPage(new URL(path, base), options);
  const text = await answer.text();
  setImmediate(() => requests--);
  return {ok: answer.ok, status: answer.status, json: async () => JSON.parse(text)};
};

async function settled() {
  do await new Promise(resolve => setTimeout(resolve, 5)); while (requests);
}
async function press(key, after = 1000) {
  later += after;  // ms
  document.listeners.keydown({key, preventDefault() {}});
  await settled();
}

async function main() {
  (0, eval)(html.split('<script nonce="NONCE">')[1].split("</script>")[0].replace('"use strict";', "")
    + "\nglobal.blocks = blocks;");
  await settled();
  const seen = [];
  const note = () => seen.push([known.title.textContent, known["prompt-text"].textContent, known.status.textContent]);
  note();
  const answers = [known.first.textContent, known.second.textContent];
  known.tags.children[1].listeners.click();
  for (const key of ["1", "x", "u", "0", "b"]) {
    await press(key);
    note();
  }
  await press("0", 100);  // the second of a double press
  note();
  base = new URL("../another-token/", address);
  await press("0");
  const earlier = known.error.textContent;
  base = address;
  await press("?");
  await press("s");
  note();
  const help = known.keys.open;
  known.keys.open = false;
  const elsewhere = {pair: "2:0-1", choice: "skip", seconds: 1};
  await fetchPage(new URL("label", address), {method: "POST", body: JSON.stringify(elsewhere)});
  await press("0");
  note();
  const markdown = new Element("div");
  blocks(markdown, process.env.MARKDOWN);
  console.log(JSON.stringify({seen, answers, markdown: markdown.outline(), help, error: known.error.textContent, earlier}));
}
main();
