// The step in time: a lane for what was measured, one for what was predicted, one for the time outside of kernels.

const LANE = { left: 0, height: 34, gap: 10, band: 18, axis: 22 };
const SHORTEST_GAP = 0.01; // microseconds: less is rounding

class Timeline {
  constructor(model, root) {
    this.model = model;
    const button = (text, label, act) => el("button.quiet", { type: "button", "aria-label": label, title: label, onclick: act }, text);
    this.note = el("span.muted");
    this.holder = el("div.lanes", { id: "timeline" });
    this.told = el("p.told", { id: "told" });
    root.append(
      el("div.heading", {}, el("h2", {}, "Timeline"), this.note, el("span.grow"), el("div.buttons", {},
        button("←", "Earlier", () => this.pan(-0.3)), button("→", "Later", () => this.pan(0.3)),
        button("−", "Zoom out", () => this.zoom(1.6)), button("+", "Zoom in", () => this.zoom(1 / 1.6)),
        button("Whole step", "Show the whole step", () => this.reset()))),
      this.holder, this.told);
    new ResizeObserver(() => this.bucket && this.holder.clientWidth !== this.width && this.paint()).observe(this.holder);
  }

  draw(bucket, basis) {
    [this.bucket, this.basis] = [bucket, basis];
    this.sampling = this.model.report.buckets.find(b => b.name === bucket.sampling);
    this.rowOf = new Map([bucket, this.sampling].filter(Boolean).map(b =>
      [b, new Map(this.model.timed(b, basis).flatMap(r => r.launches.map(i => [i, r])))]));
    this.lanes = this.build();
    this.end = Math.max(1e-9, bucket.measured?.wall_us ?? 0, ...this.lanes.map(l => l.end));
    this.at = -1;
    this.tell(null);
    this.reset();
  }

  /** Lanes of blocks {start, end, launch, name}; what is no launch has none. */
  build() {
    const { launches, measured } = this.bucket, lanes = [], { threads } = this.model.report.machine;
    const place = (durations, starts, bucket = this.bucket, now = 0) => {
      const blocks = [];
      durations.forEach((us, i) => {
        const start = starts && starts[i] !== null ? starts[i] : now;
        if (start > now + SHORTEST_GAP) blocks.push({ start: now, end: start, kind: "idle", name: "idle" });
        blocks.push({ start, end: start + (us || 0), kind: "kernel", launch: i, bucket });
        now = Math.max(now, start + (us || 0));
      });
      return { blocks, end: now };
    };
    const stream = threads ? `Team of ${count(threads, "thread")}` : "Stream 0";
    if (this.model.hasTimes(this.bucket)) {
      lanes.push({ name: `${stream}, measured`, ...place(launches.measured_us, launches.start_us), basis: "measured" });
    }
    const step = place(launches.predicted_us, null);
    const then = this.sampling ? place(this.sampling.launches.predicted_us, null, this.sampling, step.end) : { blocks: [], end: step.end };
    lanes.push({ name: `${stream}, predicted${this.sampling ? ", sampling included" : ""}`, blocks: [...step.blocks, ...then.blocks],
      end: then.end, basis: "predicted" });
    if (measured) {
      const parts = [...Object.entries(measured.parts).map(([name, us]) => [name, us, "part"]), ["unattributed", measured.unattributed_us, "rest"]];
      const blocks = [];
      let now = 0;
      for (const [name, us, kind] of parts) {
        if (us > 0) blocks.push({ start: now, end: now + us, kind, name });
        now += Math.max(0, us);
      }
      lanes.push({ name: "Outside of kernels, measured", blocks, end: now, outside: true });
    }
    this.idle = sum(lanes[0].blocks.filter(b => b.kind === "idle"), b => b.end - b.start);
    return lanes;
  }

  row(block) { return this.rowOf.get(block.bucket).get(block.launch); }

  reset() { this.view = [0, this.end]; this.paint(); }

  zoom(factor, around = 0.5) {
    const [a, b] = this.view, width = Math.min(this.end, Math.max(this.end / 3000, (b - a) * factor));
    const pivot = a + (b - a) * around;
    this.move(pivot - width * around, width);
  }

  pan(share) {
    const [a, b] = this.view;
    this.move(a + (b - a) * share, b - a);
  }

  move(start, width) {
    const a = Math.max(0, Math.min(this.end - width, start));
    this.view = [a, a + width];
    if (!this.pending) this.pending = requestAnimationFrame(() => { this.pending = 0; this.paint(); });
  }

  x(us) { return (us - this.view[0]) / (this.view[1] - this.view[0]) * this.width; }

  paint() {
    const width = this.width = this.holder.clientWidth || 600, { measured } = this.bucket;
    const step = LANE.height + LANE.gap + 16, height = LANE.axis + LANE.band + 6 + this.lanes.length * step;
    const root = svg("svg", {
      viewBox: `0 0 ${width} ${height}`, width, height, role: "application", tabindex: "0",
      "aria-label": "Timeline of the step. Left and right go from kernel to kernel, plus and minus zoom, Enter opens a kernel in the table.",
    });
    root.append(hatching(), ...this.axis(height), ...this.layers());
    this.lanes.forEach((lane, i) => {
      const y = LANE.axis + LANE.band + 6 + i * step;
      root.append(svg("text.lane", { x: 0, y: y + 11 }, `${lane.name}, ${time(lane.end)}`),
        svg("rect.lane", { x: 0, y: y + 16, width, height: LANE.height }), ...this.blocks(lane, i, y + 16));
    });
    root.addEventListener("keydown", e => this.key(e));
    root.addEventListener("wheel", e => this.wheel(e), { passive: false });
    root.addEventListener("pointerdown", e => this.drag(e, root));
    root.addEventListener("pointerover", e => this.hover(e.target));
    root.addEventListener("pointerleave", () => { highlight(null); hideTip(); });
    root.addEventListener("click", e => this.click(e.target));
    root.addEventListener("focusout", hideTip);
    const had = this.holder.contains(document.activeElement);
    this.holder.replaceChildren(root);
    if (had) root.focus({ preventScroll: true });
    const idle = this.idle && this.basis === "measured"
      ? `; idle between kernels ${time(this.idle)}, ${percent(this.idle / this.end)}` : "";
    const rest = measured ? `; unattributed ${time(measured.unattributed_us)}, ${percent(measured.unattributed_us / measured.wall_us)}` : "";
    this.note.textContent = `${time(this.view[0])} to ${time(this.view[1])} of ${time(this.end)}${idle}${rest}`;
    this.mark();
  }

  axis(height) {
    const span = this.view[1] - this.view[0], raw = span / Math.max(2, this.width / 90), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find(m => m * power >= raw) * power, parts = [];
    for (let v = Math.ceil(this.view[0] / step - 1e-9) * step; v <= this.view[1] + 1e-9; v += step) {
      const x = this.x(v), anchor = x < 20 ? "start" : x > this.width - 24 ? "end" : "middle";
      parts.push(svg("line.grid", { x1: x, x2: x, y1: 16, y2: height }),
        svg("text.tick", { x, y: 11, "text-anchor": anchor }, v < 1e-9 ? "0" : time(+v.toPrecision(6))));
    }
    return parts;
  }

  /** The band of layers over the first lane. */
  layers() {
    const { report } = this.model, { blocks } = this.lanes[0], spans = [];
    for (const b of blocks) {
      if (b.kind !== "kernel") continue;
      const { layer } = report.nodes[b.bucket.launches.node[b.launch]], last = spans.at(-1);
      if (last && last.layer === layer) last.end = b.end;
      else spans.push({ layer, start: b.start, end: b.end });
    }
    return spans.filter(s => s.layer >= 0).flatMap(s => {
      const [x, x1] = [Math.max(0, this.x(s.start)), Math.min(this.width, this.x(s.end))], w = x1 - x;
      if (w <= 0) return [];
      const text = w > 52 ? `layer ${s.layer}` : w > 16 ? String(s.layer) : "";
      return [svg(`rect.layer${s.layer % 2 ? ".odd" : ""}`, { x, y: LANE.axis, width: Math.max(0.5, w - 1), height: LANE.band - 2 }),
        text ? svg("text.layername", { x: x + w / 2, y: LANE.axis + 12, "text-anchor": "middle" }, text) : null].filter(Boolean);
    });
  }

  blocks(lane, number, y) {
    const parts = [];
    lane.blocks.forEach((b, i) => {
      const [x, x1] = [Math.max(-2, this.x(b.start)), Math.min(this.width + 2, this.x(b.end))];
      if (x1 < -1 || x > this.width + 1) return;
      const row = b.kind === "kernel" ? this.row(b) : null, w = Math.max(x1 - x, 0.6);
      parts.push(svg(`rect.block.${row ? row.color : b.kind}`, {
        x, y, width: w > 3 ? w - 0.75 : w, height: LANE.height, "data-lane": number, "data-block": i,
        "data-row": row && b.bucket === this.bucket ? row.id : null,
      }));
      const room = w - 10 + Math.min(0, x), title = row && this.model.rowTitle(row);
      const text = row ? (widthOf(title, 11) <= room ? title : this.model.rowAbout(row)) : b.kind === "idle" ? "idle" : `${b.name} ${time(b.end - b.start)}`;
      const part = room > 24 ? Math.min(1, room / widthOf(text, 11)) : 0;
      if (part * text.length >= Math.min(4, text.length)) {
        const shown = part === 1 ? text : `${text.slice(0, Math.floor(part * text.length) - 1)}…`;
        parts.push(svg(`text.blockname${row ? "" : ".on"}`, { x: Math.max(x, 0) + 5, y: y + LANE.height / 2 + 4 }, shown));
      }
    });
    return parts;
  }

  of(target) {
    return target.dataset && target.dataset.block !== undefined ? [Number(target.dataset.lane), Number(target.dataset.block)] : null;
  }

  lines(b, basis) {
    if (b.kind !== "kernel") return [b.name, time(b.end - b.start), percent((b.end - b.start) / this.end) + " of the step"];
    const row = this.row(b), node = this.model.report.nodes[b.bucket.launches.node[b.launch]];
    const { predicted_us, measured_us, roofline_us } = b.bucket.launches, i = b.launch;
    return [
      this.model.rowTitle(row), [node.path, node.layer >= 0 ? `layer ${node.layer}` : ""].filter(Boolean).join(", "),
      `${time(b.end - b.start)} ${basis}, from ${time(b.start) || "0"}`,
      [measured_us[i] !== null && basis === "predicted" ? `measured ${time(measured_us[i])}` : "",
        basis === "measured" ? `predicted ${time(predicted_us[i])}` : "", `roofline ${time(roofline_us[i])}`].filter(Boolean).join(", "),
      this.model.templateName(row.kernel),
    ];
  }

  hover(target) {
    const found = this.of(target);
    if (!found || this.dragged) { highlight(null); hideTip(); return; }
    const lane = this.lanes[found[0]], b = lane.blocks[found[1]];
    const [first, ...others] = this.lines(b, lane.basis);
    showTip(target, [el("b", {}, first), ...others.filter(Boolean).map((t, i) => el(i ? "span" : "span.muted", {}, t))]);
    highlight(b.kind === "kernel" && b.bucket === this.bucket ? this.row(b).id : null);
  }

  click(target) {
    const found = this.of(target);
    if (!found || this.dragged) return;
    this.at = found[1];
    this.atLane = found[0];
    this.tell(this.lanes[found[0]].blocks[found[1]], this.lanes[found[0]].basis);
    this.mark();
  }

  /** What is selected, beneath the lanes, with the way to its row. */
  tell(block, basis) {
    if (!block) {
      this.told.replaceChildren(el("span.muted", {}, "Hover or press a block. Ctrl and the wheel zoom, dragging moves; so do + − ← →."));
      return;
    }
    const [first, ...others] = this.lines(block, basis);
    this.told.replaceChildren(el("b", {}, first), " ", others.filter(Boolean).join(" · "), " ",
      block.kind === "kernel" ? el("button.link", { type: "button", onclick: () => openRow(this.row(block).id, block.bucket.name) }, "Show in the table") : "");
    say([first, ...others].join(", "));
  }

  mark() {
    this.holder.querySelectorAll(".chosen").forEach(e => e.classList.remove("chosen"));
    if (this.at >= 0) this.holder.querySelector(`[data-lane="${this.atLane}"][data-block="${this.at}"]`)?.classList.add("chosen");
  }

  key(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1 }, lane = this.lanes[this.atLane || 0];
    if (event.key in moves) this.step(moves[event.key]);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      this.atLane = Math.max(0, Math.min(this.lanes.length - 1, (this.atLane || 0) + (event.key === "ArrowDown" ? 1 : -1)));
      this.at = -1;
      this.step(1);
    } else if (event.key === "+" || event.key === "=") this.zoom(1 / 1.6);
    else if (event.key === "-") this.zoom(1.6);
    else if (event.key === "Home" || event.key === "0") this.reset();
    else if (event.key === "Enter" && lane.blocks[this.at]?.kind === "kernel") openRow(this.row(lane.blocks[this.at]).id, lane.blocks[this.at].bucket.name);
    else return;
    event.preventDefault();
  }

  step(by) {
    this.atLane = this.atLane || 0;
    const { blocks, basis } = this.lanes[this.atLane];
    if (!blocks.length) return;
    this.at = Math.max(0, Math.min(blocks.length - 1, this.at + by));
    const b = blocks[this.at], [a, z] = this.view;
    if (b.start < a || b.end > z) this.move((b.start + b.end) / 2 - (z - a) / 2, z - a);
    this.tell(b, basis);
    this.mark();
  }

  wheel(event) {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (!event.ctrlKey && !event.metaKey && !sideways) return; // the page scrolls
    event.preventDefault();
    const box = this.holder.getBoundingClientRect();
    if (sideways) this.pan((event.deltaX || event.deltaY) / box.width);
    else this.zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY)) / 300), (event.clientX - box.left) / box.width);
  }

  drag(event, root) {
    if (event.button !== 0 || this.view[1] - this.view[0] >= this.end) return;
    const from = event.clientX, [a, b] = this.view, width = this.width;
    const moved = e => {
      if (Math.abs(e.clientX - from) > 3) this.dragged = true;
      if (this.dragged) this.move(a - (e.clientX - from) / width * (b - a), b - a);
    };
    const done = () => {
      removeEventListener("pointermove", moved);
      removeEventListener("pointerup", done);
      setTimeout(() => { this.dragged = false; }, 0);
    };
    addEventListener("pointermove", moved);
    addEventListener("pointerup", done);
  }
}

/** The pattern that idle gaps are filled with. */
function hatching() {
  return svg("defs", {}, svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("line.hatch", { x1: 0, x2: 0, y1: 0, y2: 6 })));
}
