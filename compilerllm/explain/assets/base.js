// What everything else is made of: elements, numbers as text, the page's state in its address.

/** An HTML element. `spec` is a tag with classes, "div.card"; children that are strings become text, never markup. */
function el(spec, props, ...children) {
  return build(document.createElement(spec.split(".")[0]), spec, props, children);
}

/** The same for SVG. */
function svg(spec, props, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", spec.split(".")[0]), spec, props, children);
}

function build(node, spec, props, children) {
  const classes = spec.split(".").slice(1);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter(c => c !== null && c !== undefined && c !== false && c !== ""));
  return node;
}

const byId = id => document.getElementById(id);

const whole = n => n.toLocaleString("en-US");

/** Three significant digits: 0.123, 1.23, 12.3, 123, 1,234. */
function number(x) {
  if (!isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size === 0) return "0";
  if (size >= 999.5) return Math.round(x).toLocaleString("en-US");
  const digits = Math.max(0, 2 - Math.floor(Math.log10(size) + 1e-9));
  return digits > 8 ? x.toExponential(1) : x.toFixed(digits);
}

function scaled(x, units) {
  if (!x) return "0";
  let step = 0;
  while (Math.abs(x) >= 999.5 && step < units.length - 1) { x /= 1000; step++; }
  return `${step === 0 && Number.isInteger(x) ? whole(x) : number(x)} ${units[step]}`;
}

const bytes = x => scaled(x, ["B", "kB", "MB", "GB", "TB"]);
const flops = x => scaled(x, ["flop", "kflop", "Mflop", "Gflop", "Tflop"]);
const rate = tflops => scaled(tflops * 1e12, ["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s"]);
const time = us => us === null || us === undefined ? "–" : scaled(us, ["µs", "ms", "s"]);
const count = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;

function percent(x) {
  if (!isFinite(x)) return "–";
  if (x > 0 && x < 0.0005) return "<0.1%";
  return `${(100 * x).toFixed(x >= 0.9995 ? 0 : 1)}%`;
}

const sum = (items, of) => items.reduce((total, item) => total + of(item), 0);

/** Whole numbers as ranges: 0–31, 33. */
function ranges(numbers) {
  const sorted = [...new Set(numbers)].sort((a, b) => a - b);
  const parts = [];
  for (let i = 0; i < sorted.length;) {
    let j = i;
    while (j + 1 < sorted.length && sorted[j + 1] === sorted[j] + 1) j++;
    parts.push(i === j ? `${sorted[i]}` : `${sorted[i]}–${sorted[j]}`);
    i = j + 1;
  }
  return parts.join(", ");
}

let pen = null;

/** How many pixels wide a text is in the plots. */
function widthOf(text, size = 12) {
  if (!pen) {
    pen = document.createElement("canvas").getContext("2d");
    pen.family = getComputedStyle(document.body).fontFamily;
  }
  pen.font = `${size}px ${pen.family}`;
  return pen.measureText(text).width;
}

/** The report, from gzip in base64. */
async function unpack(text) {
  const raw = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// -- state: what is looked at, as the address's fragment, so that a link leads to it ---------------------------------

const state = {};
let watchers = [];

/** Call `change(state, names)` whenever one of `names` changes. */
function watch(names, change) {
  watchers.push({ names, change });
}

function readAddress() {
  const found = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  apply(Object.fromEntries(Object.keys({ ...state, ...found }).map(k => [k, found[k] ?? null])));
}

/** Change the state. `quiet`: no step of the browser's history. */
function go(change, quiet) {
  const next = { ...state, ...change };
  const kept = Object.entries(next).filter(([, v]) => v !== null && v !== undefined && v !== "");
  const address = `#${new URLSearchParams(kept)}`;
  if (address !== location.hash) history[quiet ? "replaceState" : "pushState"](null, "", address);
  apply(change);
}

function apply(change) {
  const changed = Object.keys(change).filter(k => (state[k] ?? null) !== (change[k] ?? null));
  for (const name of changed) state[name] = change[name] ?? null;
  for (const w of watchers) if (w.names.some(n => changed.includes(n))) w.change(state, changed);
}

const linkTo = change => {
  const kept = Object.entries({ ...state, ...change }).filter(([, v]) => v !== null && v !== undefined && v !== "");
  return `#${new URLSearchParams(kept)}`;
};

// -- the tooltip ------------------------------------------------------------------------------------------------------

function showTip(target, lines) {
  const tip = byId("tip");
  tip.replaceChildren(...lines);
  tip.hidden = false;
  const at = target.getBoundingClientRect(), box = tip.getBoundingClientRect(), edge = 8;
  const right = document.documentElement.clientWidth - box.width - edge;
  const left = Math.max(edge, Math.min(right, at.left + at.width / 2 - box.width / 2));
  const above = at.top - box.height - edge;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > edge ? above : at.bottom + edge}px`;
}

const hideTip = () => { byId("tip").hidden = true; };
const say = text => { byId("live").textContent = text; };
