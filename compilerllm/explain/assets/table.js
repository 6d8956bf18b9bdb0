// The table of kernels: sorted by any column, narrowed by a word, each row opening into all that is known of it.

const COLUMNS = [
  { name: "node", label: "Kernel", of: (r, m) => m.rowTitle(r), text: true },
  { name: "module", label: "Module", of: r => r.path, text: true, wide: true },
  { name: "layers", label: "Layers", of: r => r.layers.length, wide: true, show: r => ranges(r.layers) || "–" },
  { name: "launches", label: "Launches", of: r => r.launches.length, show: r => whole(r.launches.length), wide: true },
  { name: "bytes", label: "Bytes", of: r => r.nbytes, show: r => bytes(r.nbytes), wide: true },
  { name: "flops", label: "Flops", of: r => r.flops, show: r => flops(r.flops).replace(/flop$/, "").trim(), wide: true },
  { name: "roofline", label: "Roofline", unit: "µs", of: r => r.roofline, show: r => number(r.roofline), wide: true },
  { name: "predicted", label: "Predicted", unit: "µs", of: r => r.predicted, show: r => number(r.predicted), wide: true },
  { name: "measured", label: "Measured", unit: "µs", of: r => r.measured ?? -1,
    show: r => r.measured === null ? "–" : number(r.measured), wide: true, needsTimes: true },
  { name: "share", label: "Share", of: r => r.share, show: r => percent(r.share) },
];

class KernelTable {
  constructor(model, root) {
    this.model = model;
    this.body = el("tbody");
    this.head = el("tr");
    this.foot = el("tfoot");
    this.filter = el("input.filter", {
      type: "search", placeholder: "Filter by node, module, kernel or pass", "aria-label": "Filter kernels", spellcheck: "false",
      oninput: e => go({ only: e.target.value }, true),
    });
    this.sorter = el("select", { "aria-label": "Sort by", onchange: e => go({ sort: e.target.value }, true) });
    this.shown = el("span.muted", { id: "shown" });
    root.append(
      el("div.heading", {}, el("h2", {}, "Kernels"), this.shown, el("span.grow"), el("label.narrow", {}, "Sort by ", this.sorter),
        this.filter),
      el("table.kernels", { id: "kernels" }, el("thead", {}, this.head), this.body, this.foot),
    );
  }

  /** Fill in the rows of a bucket. */
  draw(bucket, basis) {
    this.bucket = bucket;
    this.basis = basis;
    const rows = this.model.timed(bucket, basis);
    const words = (state.only || "").toLowerCase().split(/\s+/).filter(Boolean);
    const kept = rows.filter(r => words.every(w => this.haystack(r).includes(w)));
    const columns = COLUMNS.filter(c => !c.needsTimes || this.model.hasTimes(bucket));
    const [name, down] = (state.sort || "share").startsWith("-") ? [state.sort.slice(1), false] : [state.sort || "share", true];
    const by = COLUMNS.find(c => c.name === name) || COLUMNS.at(-1);
    const flip = (by.text ? 1 : -1) * (down ? 1 : -1);
    kept.sort((a, b) => {
      const [x, y] = [by.of(a, this.model), by.of(b, this.model)];
      return flip * (by.text ? x.localeCompare(y) : x - y);
    });
    this.drawHead(columns, by, down);
    this.columns = columns;
    if (this.filter.value !== (state.only || "")) this.filter.value = state.only || "";
    const most = Math.max(1e-12, ...rows.map(r => r.share));
    this.body.replaceChildren(...kept.map(r => this.row(r, most)));
    if (!kept.length) this.body.append(el("tr", {}, el("td.empty", { colspan: columns.length }, "No kernel fits the filter.")));
    const launches = count(sum(kept, r => r.launches.length), "launch", "launches");
    this.shown.textContent = `${kept.length === rows.length ? "" : `${kept.length} of `}${count(rows.length, "kernel")}, ${launches}`;
    this.drawFoot(bucket, rows, words.length);
    this.open(state.kernel, false);
  }

  /** What of a measured step is in no kernel, and the sum: all that the shares are shares of. */
  drawFoot(bucket, rows, filtered) {
    const total = this.model.stepTime(bucket, this.basis), { measured } = bucket;
    const line = (kind, name, us, cells) => el(`tr.${kind}`, { "data-total": name }, this.columns.map(c =>
      c.name === "node" ? el("td", {}, el("span.apart", {}, name)) : el(`td.num${c.wide ? ".wide" : ""}`, {},
        c.name === "share" ? percent(us / total) : cells[c.name] ?? "")));
    const outside = measured && this.basis === "measured"
      ? [...Object.entries(measured.parts), ["unattributed, idle gaps included", measured.unattributed_us]] : [];
    const of = name => sum(rows, r => r[name] ?? 0);
    this.foot.replaceChildren(...filtered ? [] : [
      ...outside.map(([name, us]) => line("outside", name, us, { measured: number(us) })),
      line("total", "step", total, {
        launches: whole(sum(rows, r => r.launches.length)), bytes: bytes(of("nbytes")), flops: flops(of("flops")).replace(/flop$/, "").trim(),
        roofline: number(of("roofline")), predicted: number(of("predicted")), measured: number(measured ? measured.wall_us : of("measured")),
      }),
    ]);
  }

  haystack(row) {
    return [this.model.rowTitle(row), row.path, row.kernel.template, row.kernel.kind, row.kernel.family, ...row.passes].join(" ").toLowerCase();
  }

  drawHead(columns, by, down) {
    this.head.replaceChildren(...columns.map(c => {
      const sorted = c === by ? (Boolean(c.text) === down ? "ascending" : "descending") : null;
      const next = c === by && down ? `-${c.name}` : c.name;
      return el(`th.${c.name}${c.wide ? ".wide" : ""}${c.text ? "" : ".num"}`, { scope: "col", "aria-sort": sorted },
        el("button", { type: "button", "data-sort": c.name, onclick: () => go({ sort: next }, true) },
          c.label, c.unit ? el("span.unit", {}, ` ${c.unit}`) : ""));
    }));
    this.sorter.replaceChildren(...columns.map(c => el("option", { value: c.name, selected: c === by }, c.label.toLowerCase())));
  }

  row(row, most) {
    const cell = c => {
      const wide = c.wide ? ".wide" : "";
      if (c.name === "node") {
        return el("td.node", {},
          el("button.expand", { type: "button", "aria-expanded": "false", onclick: () => this.toggle(row.id) },
            el("span.caret", { "aria-hidden": "true" }), el(`i.dot.${row.color}`), el("b", {}, this.model.rowTitle(row))),
          el("small", {}, this.model.templateName(row.kernel)),
          el("small.narrow", {}, [row.path, count(row.launches.length, "launch", "launches"), time(row.time)].filter(Boolean).join(" · ")));
      }
      if (c.name === "module") return el(`td.module${wide}`, { title: row.path }, row.path ? breakable(row.path) : "–");
      if (c.name === "share") {
        const bar = el(`i.bar.${row.color}`, { style: { width: `${100 * row.share / most}%` } });
        return el("td.num.share", { "data-value": row.share }, el("span", {}, c.show(row)), el("span.track", {}, bar));
      }
      return el(`td.num.${c.name}${wide}`, { "data-value": c.of(row) }, c.show(row));
    };
    return el("tr.kernel", {
      "data-row": row.id, onmouseenter: () => highlight(row.id), onmouseleave: () => highlight(null),
    }, this.columns.map(cell));
  }

  toggle(id) {
    go({ kernel: state.kernel === id ? null : id }, true);
  }

  /** Open one row, close the one before; `jump` scrolls to it. */
  open(id, jump) {
    this.body.querySelectorAll("tr.detail").forEach(e => e.remove());
    for (const r of this.body.querySelectorAll("tr.kernel")) {
      r.classList.remove("opened");
      r.querySelector("button.expand").setAttribute("aria-expanded", "false");
    }
    const line = id === null || id === undefined ? null : this.body.querySelector(`tr.kernel[data-row="${CSS.escape(id)}"]`);
    if (!line) return;
    const row = this.model.timed(this.bucket, this.basis).find(r => r.id === id);
    line.classList.add("opened");
    line.querySelector("button.expand").setAttribute("aria-expanded", "true");
    line.after(el("tr.detail", {}, el("td", { colspan: this.columns.length }, rowDetail(this.model, this.bucket, row, this.basis))));
    if (jump) {
      line.scrollIntoView({ block: "start" });
      line.querySelector("button.expand").focus({ preventScroll: true });
    }
  }
}

/** A path or a list that may be broken after its dots and commas. */
function breakable(path) {
  return path.split(/(?<=[.,])/).flatMap(part => [part, el("wbr")]);
}

/** All that is known of a row: numbers, IR, origin, passes, code, the choice. */
function rowDetail(model, bucket, row, basis) {
  return el("div.facts", {},
    el("div.fact.figures", {}, el("h3", {}, "Time and work"), figuresOf(model, row, basis)),
    el("div.fact.code", {}, el("h3", {}, "Kernel"), kernelFacts(model, row)),
    el("div.fact.why", {}, el("h3", {}, "Why this one"), pickFacts(row)),
    el("div.fact.ir", {}, el("h3", {}, row.nodes.length === 1 ? "IR node" : "IR nodes"), nodeList(model, row)),
    el("div.fact.from", {}, el("h3", {}, "Where it comes from"), originFacts(model, bucket, row)));
}

function definitions(pairs) {
  return el("dl", {}, pairs.filter(p => p && p[1] !== "" && p[1] !== null).map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v))));
}

function figuresOf(model, row, basis) {
  const n = row.launches.length, machine = model.report.machine, seconds = row.time / 1e6;
  const each = (value, show) => n === 1 ? show(value) : [show(value), el("small", {}, ` ${show(value / n)} each`)];
  const known = row.nbytes || row.flops;
  return definitions([
    ["launches", `${whole(n)}${row.layers.length ? `, layers ${ranges(row.layers)}` : ""}`],
    ["bytes", each(row.nbytes, bytes)],
    ["flops", each(row.flops, flops)],
    ["roofline", each(row.roofline, time)],
    ["predicted", each(row.predicted, time)],
    row.measured === null ? null : ["measured", each(row.measured, time)],
    row.measured === null ? null : ["measured / predicted", number(row.measured / row.predicted)],
    known && row.time ? ["of its roofline", percent(row.roofline / row.time)] : null,
    row.nbytes && seconds ? ["reads and writes", `${number(row.nbytes / seconds / 1e9)} of ${number(machine.bandwidth)} GB/s`] : null,
    row.flops && seconds ? ["computes", `${rate(row.flops / seconds / 1e12)} of ${rate(machine.tflops)}`] : null,
    known ? null : ["", "Its node's work is counted at the node's first launch."],
    ["share of the step", `${percent(row.share)} of the ${basis} time`],
  ]);
}

function kernelFacts(model, row) {
  const k = row.kernel;
  return definitions([
    ["template", el("code", {}, k.template)],
    ["kind", k.kind], ["family", k.family],
    k.num_warps ? ["warps", whole(k.num_warps)] : null,
    k.shared_bytes ? ["shared memory", bytes(k.shared_bytes)] : null,
    k.kind === "triton" || k.kind === "cutlass" ? ["starts early", k.dependent ? "yes, while its predecessor still runs" : "no"] : null,
    k.key ? ["key", el("code", { title: k.key }, k.key.slice(0, 16))] : null,
    Object.keys(k.config).length ? ["constants", configText(k.config)] : null,
  ]);
}

function configText(config, reference) {
  const parts = Object.entries(config).filter(([k, v]) => !reference || JSON.stringify(reference[k]) !== JSON.stringify(v));
  if (!parts.length) return el("code.config", {}, reference ? "the same" : "–");
  const shown = v => typeof v === "string" ? v : JSON.stringify(v);
  return el("code.config", {}, parts.map(([k, v]) => [el("span", {}, `${k}=${shown(v)}`), " "]));
}

function pickFacts(row) {
  const pick = row.pick;
  if (!pick) return el("p.muted", {}, "There is one way to run this node here; nothing was chosen.");
  const known = [pick, ...pick.alternatives].filter(c => c.us !== null);
  const most = Math.max(1e-12, ...known.map(c => c.us));
  const line = (c, chosen) => el("tr", { class: chosen ? "chosen" : null },
    el("td", {}, chosen ? el("span.tick", { "aria-label": "chosen" }, "✓") : ""),
    el("td", {}, chosen ? configText(c.config) : configText(c.config, pick.config)),
    el("td.num", {}, c.us === null ? "not timed" : time(c.us)),
    el("td.spark", {}, c.us === null ? "" : el("i.bar.linear", { style: { width: `${100 * c.us / most}%` } })));
  return [
    definitions([["reason", pick.why], ["problem", el("code", {}, breakable(pick.problem))],
      pick.timed_at ? ["timed at", el("code", {}, breakable(pick.timed_at))] : null]),
    el("table.candidates", {},
      el("caption", {}, pick.alternatives.length ? `${count(pick.alternatives.length + 1, "candidate")}; others show where they differ`
        : "the only candidate"),
      el("tbody", {}, line(pick, true), more(pick.alternatives.map(c => () => line(c, false)), 6, "tr"))),
  ];
}

/** The first items, and a button for the rest. Items are functions, so that what is not seen is not built. */
function more(items, first, wrap) {
  const shown = items.slice(0, items.length > first + 1 ? first : items.length).map(f => f());
  const rest = items.slice(shown.length);
  if (!rest.length) return shown;
  const button = el("button.more", { type: "button" }, `${whole(rest.length)} more`);
  const holder = wrap === "tr" ? el("tr", {}, el("td", { colspan: 9 }, button)) : el(wrap, {}, button);
  button.addEventListener("click", () => holder.replaceWith(...rest.map(f => f())));
  return [shown, holder];
}

function nodeList(model, row) {
  const unique = [...new Set(row.nodes)];
  return el("ul.nodes", {}, more(unique.map(i => () => el("li", {}, irLine(model.report.nodes[i].text))), 2, "li"));
}

function originFacts(model, bucket, row) {
  const nodes = row.nodes.map(i => model.report.nodes[i]);
  const general = of => [...new Set(nodes.flatMap(n => of(n).map(like)))].filter(Boolean);
  const paths = general(n => [n.path]), modules = general(n => n.modules);
  const codeList = names => el("ul.paths", {}, more(names.map(p => () => el("li", {}, el("code", {}, breakable(p)))), 3, "li"));
  const pass = name => {
    const at = model.passIndex(name, bucket);
    return el("li", {}, at < 0 ? el("span.chip", {}, name)
      : el("a.chip", { href: linkTo({ view: "passes", pass: String(at), fn: null, line: null }) }, name));
  };
  return definitions([
    [paths.length === 1 ? "module" : "modules", paths.length ? codeList(paths) : "outside of the model's modules"],
    modules.length && modules.join() !== paths.join() ? ["weights of", codeList(modules)] : null,
    ["captured as", row.sources.length ? codeList(row.sources) : "–"],
    nodes[0].body.length ? ["does", nodes[0].body.join(", ")] : null,
    ["made by", row.passes.length ? el("ol.chips", {}, row.passes.map(pass)) : "no pass; it stands as it was captured"],
  ]);
}
