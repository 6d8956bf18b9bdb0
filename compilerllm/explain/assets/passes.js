// The view of passes, in the order they ran, each with its graph before and after; and that of near misses.

class PassView {
  constructor(model, root) {
    this.model = model;
    this.root = root;
    this.list = el("ol.passlist", { id: "passlist", "aria-label": "Passes in the order they ran" });
    this.only = el("input", { type: "checkbox", id: "changedonly", onchange: () => this.drawList() });
    this.detail = el("div.panel.pass", { id: "pass" });
    root.append(el("div.split", {},
      el("nav.panel.side", { "aria-label": "Passes" }, el("div.heading", {}, el("h2", {}, "Passes"), el("span.grow"),
        el("label.check", {}, this.only, "only what changed")), this.list), this.detail));
    watch(["pass", "fn", "line", "view"], (_, changed) => this.draw(changed));
  }

  draw(changed) {
    if (this.root.hidden) return;
    const { passes } = this.model.report;
    if (!passes.length) { this.detail.replaceChildren(el("p.muted", {}, "No pass ran.")); return; }
    const first = passes.findIndex(p => p.before !== p.after);
    const at = state.pass !== null && passes[state.pass] ? Number(state.pass) : Math.max(0, first);
    if (at === this.at && !changed.some(n => n === "fn" || n === "line")) return;
    this.at = at;
    this.drawList();
    this.drawPass(passes[at]);
  }

  drawList() {
    const { passes } = this.model.report, parts = [];
    let phase = null;
    passes.forEach((p, i) => {
      if (this.only.checked && p.before === p.after && i !== this.at) return;
      if (p.phase !== phase) parts.push(el("li.phase", {}, phase = p.phase));
      const changed = p.before !== p.after;
      parts.push(el("li", {}, el(`a.pass${changed ? "" : ".idle"}`, {
        href: linkTo({ view: "passes", pass: String(i), fn: null, line: null }), "data-pass": i,
        "aria-current": i === this.at ? "true" : null, title: p.meaning,
      }, el("span.name", {}, p.name, p.buckets.length ? el("small", {}, bucketsText(p.buckets, this.model.report.buckets)) : ""),
      p.misses.length ? el("span.badge.miss", { title: count(p.misses.length, "near miss", "near misses") }, whole(p.misses.length)) : "",
      el("span.badge", { title: count(p.matches, "match", "matches") }, p.matches ? whole(p.matches) : "–"))));
    });
    this.list.replaceChildren(...parts);
    const current = this.list.querySelector("[aria-current]"), side = this.list.parentNode;
    if (current && side.scrollHeight > side.clientHeight) {
      side.scrollTop = current.offsetTop - side.clientHeight / 2;
    }
  }

  drawPass(p) {
    const { texts, buckets } = this.model.report;
    const counts = Object.entries(p.counts).map(([k, v]) => `${whole(v)} ${k}`).join(", ");
    const where = Object.entries(p.functions).filter(([, n]) => n).map(([f, n]) => `${f ? `@${f}` : "module"} ${whole(n)}`).join(", ");
    const head = [
      el("div.heading", {}, el("h2", {}, p.name), el("span.muted", {}, p.phase), el("span.grow"), this.turner()),
      el("p", {}, p.meaning),
      definitions([
        ["matches", `${whole(p.matches)}${where ? `: ${where}` : ""}`], ["counts", counts], ["took", time(p.seconds * 1e6)],
        p.buckets.length ? [count(p.buckets.length, "bucket"), el("span", { title: p.buckets.join(", ") }, bucketsText(p.buckets, buckets))] : null,
      ]),
    ];
    if (p.misses.length) {
      head.push(el("details.misses", { open: p.misses.length <= 3 }, el("summary", {}, count(p.misses.length, "near miss", "near misses")),
        el("ul", {}, more(p.misses.map(m => () => el("li", {}, missBody(m))), 12, "li"))));
    }
    this.detail.replaceChildren(...head, el("div.diffs", { id: "diffs" }, this.diffs(p, texts)));
    const hit = this.detail.querySelector("tr.hit");
    if (hit) hit.scrollIntoView({ block: "center" });
    else if (state.fn) this.detail.querySelector(`[data-fn="${CSS.escape(state.fn)}"]`)?.scrollIntoView({ block: "start" });
  }

  turner() {
    const { passes } = this.model.report;
    const step = (by, sign, label) => {
      let i = this.at + by;
      while (passes[i] && passes[i].before === passes[i].after) i += by;
      return el("button.quiet", { type: "button", disabled: !passes[i], "aria-label": label, title: label,
        onclick: () => go({ pass: String(i), fn: null, line: null }) }, sign);
    };
    return el("div.buttons", {}, step(-1, "‹ before", "The pass before that changed something"),
      step(1, "next ›", "The next pass that changed something"));
  }

  diffs(p, texts) {
    const before = functionsOf(texts[p.before]), after = functionsOf(texts[p.after]);
    const names = [...new Set([...after.keys(), ...before.keys()])];
    const same = name => before.get(name)?.join("\n") === after.get(name)?.join("\n");
    const order = [...names.filter(n => !same(n)), ...names.filter(same)];
    if (p.before === p.after) order.sort((a, b) => names.indexOf(a) - names.indexOf(b));
    return order.map(name => {
      const a = before.get(name) || [], b = after.get(name) || [], unchanged = same(name);
      const what = !before.has(name) ? "new" : !after.has(name) ? "gone" : unchanged ? "unchanged" : "changed";
      const body = el("div");
      const fill = () => body.childElementCount || body.append(unchanged ? plainIR(b, state.line) : diffTable(a, b, state.line));
      const wanted = state.line && (a.includes(state.line) || b.includes(state.line)) && (!state.fn || state.fn === name);
      const box = el("details.function", { "data-fn": name, open: !unchanged || wanted || state.fn === name,
        ontoggle: e => e.target.open && fill() },
      el("summary", {}, el("code", {}, name ? `@${name}` : "module"), el(`span.state.${what}`, {}, what),
        el("span.muted", {}, a.length === b.length || !a.length || !b.length ? count(Math.max(a.length, b.length), "line")
          : `${a.length} to ${count(b.length, "line")}`)), body);
      if (box.open) fill();
      return box;
    });
  }
}

/** A function that a pass left alone. */
function plainIR(lines, hit) {
  return el("table.diff.plain", {}, el("colgroup", {}, el("col.no"), el("col")), el("tbody", {}, lines.map((line, i) =>
    el(`tr.same${line === hit ? ".hit" : ""}`, {}, el("td.no", {}, String(i + 1)), el("td", {}, irLine(line))))));
}

function bucketsText(names, buckets) {
  if (names.length === 1) return names[0];
  const order = buckets.map(b => b.name).filter(n => names.includes(n));
  return order.length === buckets.length ? "every bucket" : `${order[0]} … ${order.at(-1)}`;
}

function missBody(m) {
  return [el("p.reason", {}, m.reason), irLine(m.node),
    m.path || m.function ? el("small.muted", {}, [m.function ? `@${m.function}` : "", m.path].filter(Boolean).join(", ")) : ""];
}

class MissView {
  constructor(model, root) {
    this.model = model;
    this.root = root;
    this.all = model.report.passes.flatMap((p, pass) => p.misses.map(m => ({ ...m, pass, name: p.name })));
    this.filter = el("input.filter", { id: "missfilter", type: "search", spellcheck: "false", "aria-label": "Filter near misses",
      placeholder: "Filter by reason, node, module", oninput: e => go({ miss: e.target.value }, true) });
    const names = [...new Set(this.all.map(m => m.name))];
    this.pass = el("select", { "aria-label": "Pass", onchange: e => go({ misspass: e.target.value }, true) },
      el("option", { value: "" }, "every pass"), names.map(n => el("option", { value: n }, n)));
    this.shown = el("span.muted");
    this.list = el("div", { id: "misslist" });
    root.append(el("div.panel", {}, el("div.heading", {}, el("h2", {}, "Near misses"), this.shown, el("span.grow"), this.pass, this.filter),
      el("p.muted", {}, "Nodes that a pass nearly rewrote, and the condition that failed."), this.list));
    watch(["miss", "misspass", "view"], () => this.draw());
  }

  draw() {
    if (this.root.hidden) return;
    const words = (state.miss || "").toLowerCase().split(/\s+/).filter(Boolean);
    if (this.filter.value !== (state.miss || "")) this.filter.value = state.miss || "";
    this.pass.value = state.misspass || "";
    const kept = this.all.filter(m => (!state.misspass || m.name === state.misspass)
      && words.every(w => `${m.name} ${m.reason} ${m.node} ${m.path} ${m.function}`.toLowerCase().includes(w)));
    this.shown.textContent = kept.length === this.all.length ? whole(kept.length) : `${whole(kept.length)} of ${whole(this.all.length)}`;
    const groups = new Map();
    for (const m of kept) {
      const key = JSON.stringify([m.name, m.reason]);
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(m);
    }
    const none = this.all.length ? "No near miss fits the filter." : "There are none: whatever a pass looked at, it rewrote or passed by.";
    this.list.replaceChildren(...groups.size ? [...groups.values()].map(g => this.group(g)) : [el("p.empty", {}, none)]);
  }

  group(misses) {
    const first = misses[0];
    return el("article.missgroup", {},
      el("header", {}, el("a.chip", { href: linkTo({ view: "passes", pass: String(first.pass), fn: null, line: null }) }, first.name),
        el("b.reason", {}, first.reason), misses.length > 1 ? el("span.badge", {}, whole(misses.length)) : ""),
      el("ul.nodes", {}, more(misses.map(m => () => el("li", {}, irLine(m.node),
        el("small.muted", {}, [m.function ? `@${m.function}` : "", m.path].filter(Boolean).join(", ")))), 5, "li")));
  }
}
