// One box that looks through everything: kernels, nodes, modules, passes, near misses, lines of IR.

const GROUPS = [["kernel", "Kernels"], ["node", "Nodes"], ["module", "Modules"], ["pass", "Passes"], ["miss", "Near misses"], ["ir", "IR"]];
const FIRST = 6; // hits of a group that are shown at once

class Search {
  constructor(model) {
    this.model = model;
    this.box = byId("search");
    this.list = byId("hits");
    this.box.addEventListener("input", () => this.look());
    this.box.addEventListener("focus", () => this.box.value && this.look());
    this.box.addEventListener("keydown", e => this.key(e));
    document.addEventListener("keydown", e => {
      if (e.key === "/" && !/INPUT|SELECT|TEXTAREA/.test(e.target.tagName) && !e.ctrlKey && !e.metaKey) {
        e.preventDefault();
        this.box.focus();
        this.box.select();
      }
    });
    document.addEventListener("pointerdown", e => { if (!e.target.closest(".search")) this.close(); });
  }

  /** Everything that can be found, made at the first search. */
  index() {
    if (this.entries) return this.entries;
    const { model } = this, { report } = model, entries = [];
    const add = (kind, title, more, open, words = "") => entries.push({
      kind, title, more, open, low: `${title} ${more} ${words}`.toLowerCase() });
    const places = new Map(), modules = new Map(), seen = new Map();
    for (const b of report.buckets) {
      for (const r of model.rows(b)) {
        const note = (map, key, make) => { if (!map.has(key)) map.set(key, make()); map.get(key).buckets.push([b.name, r.id]); };
        note(places, r.kernelIndex, () => ({ kernel: r.kernel, title: model.rowTitle(r), buckets: [] }));
        if (r.path) note(modules, r.path, () => ({ buckets: [] }));
        for (const n of r.nodes) note(seen, report.nodes[n].text, () => ({ node: report.nodes[n], buckets: [] }));
      }
    }
    const here = found => found.find(([name]) => name === model.bucket(state.bucket).name) || found[0];
    const openAt = found => () => { const [bucket, kernel] = here(found); openRow(kernel, bucket); };
    const inBuckets = found => bucketsText([...new Set(found.map(f => f[0]))], report.buckets);
    for (const { kernel: k, title, buckets } of places.values()) {
      add("kernel", model.templateName(k), `${title}, ${inBuckets(buckets)}`, openAt(buckets),
        Object.entries(k.config).map(([n, v]) => `${n}=${v}`).join(" ") + ` ${k.family} ${k.key}`);
    }
    for (const { node, buckets } of seen.values()) add("node", node.text, node.path, openAt(buckets), node.passes.join(" "));
    for (const [path, { buckets }] of modules) {
      add("module", path, inBuckets(buckets), () => {
        go({ view: "step", bucket: here(buckets)[0], only: path, kernel: null });
        view.table.filter.scrollIntoView({ block: "start" });
        view.table.filter.focus({ preventScroll: true });
      });
    }
    report.passes.forEach((p, i) => {
      add("pass", p.name, `${p.phase}: ${p.meaning}`, () => go({ view: "passes", pass: String(i), fn: null, line: null }));
      for (const m of p.misses) {
        add("miss", m.reason, `${p.name}: ${m.node}`, () => go({ view: "misses", miss: m.reason, misspass: p.name }), m.path);
      }
    });
    this.lines(report, add);
    return this.entries = entries;
  }

  /** Each line of IR once, where it first stands. */
  lines(report, add) {
    const known = new Set(), read = new Set();
    report.passes.forEach((p, i) => {
      for (const which of ["before", "after"]) {
        if (read.has(p[which])) continue;
        read.add(p[which]);
        for (const [fn, lines] of functionsOf(report.texts[p[which]])) {
          for (const line of lines) {
            if (known.has(line) || !/\w/.test(line)) continue;
            known.add(line);
            const where = i === 0 && which === "before" ? "as captured" : `${which === "after" ? "from" : "before"} ${p.name} on`;
            add("ir", line.trim(), `@${fn}, ${where}`, () => go({ view: "passes", pass: String(i), fn, line }));
          }
        }
      }
    });
  }

  look(all) {
    const words = this.box.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) { this.close(); return; }
    const hits = this.index().filter(e => words.every(w => e.low.includes(w)));
    const best = e => (words.every(w => e.title.toLowerCase().includes(w)) ? 0 : 1);
    const parts = [];
    this.found = [];
    for (const [kind, label] of GROUPS) {
      const of = hits.filter(h => h.kind === kind).sort((a, b) => best(a) - best(b));
      if (!of.length) continue;
      const shown = all === kind ? of.slice(0, 500) : of.slice(0, FIRST);
      parts.push(el("div.group", { role: "presentation" }, el("span", {}, label), el("span.muted", {}, whole(of.length)),
        of.length > shown.length && all !== kind
          ? el("button.link", { type: "button", tabindex: "-1", onclick: () => { this.look(kind); this.box.focus(); } }, "show all") : ""));
      for (const h of shown) {
        const id = `hit${this.found.length}`;
        parts.push(el("div.hit", { role: "option", id, "data-kind": kind, "aria-selected": "false", onclick: () => this.open(h) },
          el("span.title", {}, this.marked(cut(h.title, words), words)), el("span.more", {}, this.marked(cut(h.more, words), words))));
        this.found.push(h);
      }
    }
    if (!parts.length) parts.push(el("div.group", {}, "Nothing has all of these words."));
    this.list.replaceChildren(...parts);
    this.list.hidden = false;
    this.list.scrollTop = 0;
    this.box.setAttribute("aria-expanded", "true");
    this.select(this.found.length ? 0 : -1);
  }

  /** Text with the words found in it marked. */
  marked(text, words) {
    const low = text.toLowerCase(), spans = [];
    for (const w of words) for (let i = low.indexOf(w); i >= 0; i = low.indexOf(w, i + w.length)) spans.push([i, i + w.length]);
    spans.sort((a, b) => a[0] - b[0]);
    const parts = [];
    let at = 0;
    for (const [a, b] of spans) {
      if (a < at) continue;
      parts.push(text.slice(at, a), el("mark", {}, text.slice(a, b)));
      at = b;
    }
    return [...parts, text.slice(at)];
  }

  select(at) {
    this.at = at;
    this.list.querySelectorAll(".hit").forEach((e, i) => e.setAttribute("aria-selected", String(i === at)));
    const chosen = byId(`hit${at}`);
    if (chosen) { this.box.setAttribute("aria-activedescendant", chosen.id); chosen.scrollIntoView({ block: "nearest" }); }
    else this.box.removeAttribute("aria-activedescendant");
  }

  key(event) {
    if (event.key === "Escape") { this.close(); this.box.blur(); return; }
    if (this.list.hidden || !this.found.length) return;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      this.select((this.at + (event.key === "ArrowDown" ? 1 : -1) + this.found.length) % this.found.length);
    } else if (event.key === "Enter") {
      event.preventDefault();
      this.open(this.found[this.at]);
    }
  }

  open(hit) {
    this.close();
    this.box.blur();
    hit.open();
  }

  close() {
    this.list.hidden = true;
    this.box.setAttribute("aria-expanded", "false");
    this.box.removeAttribute("aria-activedescendant");
  }
}

/** A long text around the first word found in it. */
function cut(text, words) {
  const room = 180;
  if (text.length <= room) return text;
  const at = Math.max(0, Math.min(...words.map(w => text.toLowerCase().indexOf(w)).filter(i => i >= 0), text.length) - 40);
  const start = at + room > text.length ? Math.max(0, text.length - room) : at;
  return `${start ? "…" : ""}${text.slice(start, start + room)}${start + room < text.length ? "…" : ""}`;
}
