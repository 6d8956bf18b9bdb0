// The roofline: each row of the table as a point, operations a byte against operations a second, both logarithmic.

const PLOT = { left: 58, right: 16, top: 14, bottom: 44, height: 400 };
const NAME_HEIGHT = 15;

class Roofline {
  constructor(model, root) {
    this.model = model;
    this.holder = el("div.plot", { id: "roofline" });
    this.legend = el("ul.legend");
    root.append(el("div.heading", {}, el("h2", {}, "Roofline"), this.note = el("span.muted")), this.holder, this.legend);
    new ResizeObserver(() => this.bucket && this.holder.clientWidth !== this.width && this.paint()).observe(this.holder);
  }

  draw(bucket, basis) {
    [this.bucket, this.basis] = [bucket, basis];
    this.note.textContent = `${basis}; area by share of the step`;
    this.paint();
  }

  /** Where a row stands. Without operations or bytes there is no intensity: such points go to the strip at the left, as
      far below the roof there as their time is above its bound. */
  place(row) {
    const seconds = row.time / 1e6;
    const reach = row.time && row.roofline ? Math.min(1.5, row.roofline / row.time) : 0;
    if (row.flops && row.nbytes && seconds) return { x: row.flops / row.nbytes, y: row.flops / seconds / 1e12, strip: false };
    return { x: null, reach, strip: true };
  }

  paint() {
    const { machine } = this.model.report, width = this.width = this.holder.clientWidth || 600;
    const rows = this.model.timed(this.bucket, this.basis);
    const points = rows.map(row => ({ row, ...this.place(row) }));
    const inside = points.filter(p => !p.strip), ridge = this.model.ridge;
    const strip = points.length > inside.length ? (width < 520 ? 44 : 64) : 0;
    const most = Math.max(1e-12, ...rows.map(r => r.share)), seen = inside.filter(p => p.row.share >= 0.02 * most);
    const xs = [...seen.map(p => p.x), ridge || 1], low = Math.min(...xs) / 2.2, high = Math.max(...xs) * 4;
    const roof = x => ridge ? Math.min(machine.tflops, x * machine.bandwidth / 1e3) : 1;
    const ys = seen.map(p => p.y), least = roof(low) / 100; // what hardly counts, or is further off, stands at the edge
    const [bottom, top] = [Math.max(least, Math.min(...ys, roof(low)) / 2.5), Math.max(machine.tflops, ...ys) * 2];
    const box = { x0: PLOT.left + strip, x1: width - PLOT.right, y0: PLOT.height - PLOT.bottom, y1: PLOT.top };
    const log = (a, b, from, to) => v => from + (to - from) * (Math.log(v) - Math.log(a)) / (Math.log(b) - Math.log(a));
    const px = log(low, high, box.x0, box.x1), py = log(bottom, top, box.y0, box.y1);
    let stripped = 1; // side by side, since those without work of their own all stand at the bottom
    for (const p of points) {
      p.r = Math.max(3.5, (p.strip ? 7 : 15) * Math.sqrt(p.row.share / most));
      p.cx = p.strip ? PLOT.left + strip / 2 - 4 + (strip / 4) * (stripped++ % 3 - 1) : Math.max(box.x0 + 4, Math.min(box.x1 - 4, px(p.x)));
      p.cy = p.strip ? box.y0 - 10 - (box.y0 - box.y1 - 20) * Math.min(1, p.reach) : Math.max(box.y1 + 4, Math.min(box.y0 - 4, py(p.y)));
    }
    points.sort((a, b) => b.r - a.r || a.row.launches[0] - b.row.launches[0]);
    const root = svg("svg", {
      viewBox: `0 0 ${width} ${PLOT.height}`, width, height: PLOT.height, role: "group", tabindex: "0",
      "aria-label": "Roofline plot. Arrow keys go from kernel to kernel, Enter opens one in the table.",
      onkeydown: e => this.key(e), onfocusout: hideTip,
    });
    root.append(...this.axes(low, high, bottom, top, px, py, box));
    if (strip) root.append(...this.strip(strip, box));
    const busy = points.map(p => [p.cx - p.r, p.cy - p.r, p.cx + p.r, p.cy + p.r]);
    if (ridge) root.append(...this.roof(low, high, ridge, px, py, roof, box, busy));
    this.marks = points.map(p => this.mark(p));
    root.append(svg("g.points", {}, this.marks), svg("g.names", {}, this.names(points, busy, box)));
    this.holder.replaceChildren(root);
    this.points = points;
    this.at = -1;
    const colors = new Map(points.map(p => [p.row.color, 0]));
    this.legend.replaceChildren(...FAMILIES.filter(f => colors.has(f[0])).map(f => el("li", {}, el(`i.dot.${f[0]}`), f[1])));
  }

  axes(low, high, bottom, top, px, py, box) {
    const scale = top < 4 ? 1e-3 : 1;
    const parts = [svg("rect.frame", { x: box.x0, y: box.y1, width: box.x1 - box.x0, height: box.y0 - box.y1 })];
    const ticks = (a, b, room) => {
      const first = Math.ceil(Math.log10(a)), last = Math.floor(Math.log10(b)), step = Math.max(1, Math.ceil((last - first + 1) / room));
      return Array.from({ length: last - first + 1 }, (_, i) => first + i).map(e => [10 ** e, (e - first) % step === 0]);
    };
    for (const [v, named] of ticks(low, high, (box.x1 - box.x0) / 60)) {
      parts.push(svg("line.grid", { x1: px(v), x2: px(v), y1: box.y0, y2: box.y1 }));
      if (named) parts.push(svg("text.tick", { x: px(v), y: box.y0 + 16, "text-anchor": "middle" }, tickText(v)));
    }
    for (const [v, named] of ticks(bottom, top, 12)) {
      parts.push(svg("line.grid", { x1: box.x0, x2: box.x1, y1: py(v), y2: py(v) }));
      if (named) parts.push(svg("text.tick", { x: PLOT.left - 8, y: py(v) + 4, "text-anchor": "end" }, tickText(v / scale)));
    }
    parts.push(svg("text.axis", { x: (box.x0 + box.x1) / 2, y: box.y0 + 36, "text-anchor": "middle" }, "flop a byte"),
      svg("text.axis", { x: -(box.y0 + box.y1) / 2, y: 14, "text-anchor": "middle", transform: "rotate(-90)" }, scale === 1 ? "TFLOP/s" : "GFLOP/s"));
    return parts;
  }

  strip(width, box) {
    const x = PLOT.left, middle = x + width / 2 - 4;
    return [
      svg("rect.strip", { x, y: box.y1, width: width - 8, height: box.y0 - box.y1 }),
      svg("text.tick", { x: middle, y: box.y0 + 16, "text-anchor": "middle" }, "none"),
    ];
  }

  roof(low, high, ridge, px, py, roof, box, busy) {
    const { machine } = this.model.report;
    const path = `M${px(low)},${py(roof(low))} L${px(ridge)},${py(machine.tflops)} L${px(high)},${py(machine.tflops)}`;
    const slope = Math.atan2(py(machine.tflops) - py(roof(low)), px(ridge) - px(low)) * 180 / Math.PI;
    const peak = rate(machine.tflops), speed = `${number(machine.bandwidth)} GB/s`;
    const flat = [px(high) - 6 - widthOf(peak), py(machine.tflops) - 20, px(high), py(machine.tflops) - 2];
    const x = Math.sqrt(low * ridge), ridgeText = `ridge ${number(ridge)}`, wide = widthOf(ridgeText) + 8;
    const left = px(ridge) + wide < box.x1 ? px(ridge) + 5 : px(ridge) - wide + 3;
    busy.push(flat, [px(ridge) - 3, py(machine.tflops), px(ridge) + 3, box.y0], [left, box.y0 - 20, left + wide, box.y0 - 2]);
    for (let x = box.x0; x < box.x1; x += 5) { // the roof itself, so that no name is written over it
      const y = py(roof(low * (high / low) ** ((x - box.x0) / (box.x1 - box.x0))));
      busy.push([x - 4, y - 5, x + 4, y + 5]);
    }
    const [mx, my] = [px(x), py(roof(x))];
    busy.push([mx - 45, my - 40, mx + 35, my - 6]);
    return [
      svg("line.ridge", { x1: px(ridge), x2: px(ridge), y1: box.y0, y2: py(machine.tflops) }),
      svg("path.roof", { d: path }),
      svg("text.note", { x: px(high) - 6, y: py(machine.tflops) - 8, "text-anchor": "end" }, peak),
      svg("text.note", { transform: `translate(${mx},${my}) rotate(${slope})`, y: -8, "text-anchor": "middle" }, speed),
      svg("text.note", { x: left, y: box.y0 - 7 }, ridgeText),
    ];
  }

  mark(p) {
    const title = this.model.rowTitle(p.row);
    const mark = svg(`circle.point.${p.row.color}${p.strip ? ".hollow" : ""}`, {
      cx: p.cx, cy: p.cy, r: p.r, "data-row": p.row.id, role: "img", "aria-label": `${title}: ${this.describe(p).join(", ")}`,
      onmouseenter: () => this.show(p, mark), onmouseleave: () => { hideTip(); highlight(null); },
      onclick: () => openRow(p.row.id, this.bucket.name),
    });
    return mark;
  }

  describe(p) {
    const r = p.row;
    return [
      p.strip ? (r.nbytes ? "no operations" : "work counted at its node's first launch")
        : `${rate(p.y)} at ${number(p.x)} flop a byte`,
      r.roofline && r.time ? `${percent(r.roofline / r.time)} of its roofline` : "",
      `${time(r.time)}, ${percent(r.share)} of the step`,
    ].filter(Boolean);
  }

  show(p, mark) {
    showTip(mark, [el("b", {}, this.model.rowTitle(p.row)), el("span.muted", {}, p.row.path),
      ...this.describe(p).map(line => el("span", {}, line))]);
    highlight(p.row.id);
  }

  key(event) {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Enter" && this.at >= 0) {
      event.preventDefault(); // the row's button, which has the focus next, would get it too
      openRow(this.points[this.at].row.id, this.bucket.name);
    }
    if (event.key === "Escape") { hideTip(); highlight(null); }
    if (!move) return;
    event.preventDefault();
    const order = this.points.map((p, i) => i).sort((a, b) => this.points[a].cx - this.points[b].cx || a - b);
    const place = (order.indexOf(this.at) + (this.at < 0 && move < 0 ? 0 : move) + order.length) % order.length;
    this.at = order[place];
    this.show(this.points[this.at], this.marks[this.at]);
    say(this.marks[this.at].getAttribute("aria-label"));
  }

  /** Names beside points, largest share first, where nothing else stands; those without room are told by the tooltip. */
  names(points, busy, box) {
    const found = [], most = Math.max(...points.map(p => p.row.share));
    const order = points.map((p, i) => [p, i]).sort(([a], [b]) => b.row.share - a.row.share);
    for (const [p, own] of order) {
      if (p.strip || p.row.share < 0.02 * most) continue;
      const texts = [...new Set([this.model.rowTitle(p.row), this.model.rowAbout(p.row)])];
      const text = texts.find(t => this.spot(p, own, widthOf(t) + 4, busy, box));
      if (!text) continue;
      const w = widthOf(text) + 4, [x, y] = this.spot(p, own, w, busy, box);
      busy.push([x, y, x + w, y + NAME_HEIGHT]);
      const to = [Math.max(x, Math.min(p.cx, x + w)), y + NAME_HEIGHT / 2], length = Math.hypot(to[0] - p.cx, to[1] - p.cy);
      if (length > p.r + 8) {
        const from = [p.cx + (to[0] - p.cx) * p.r / length, p.cy + (to[1] - p.cy) * p.r / length];
        found.push(svg("line.leader", { x1: from[0], y1: from[1], x2: to[0], y2: to[1] }));
      }
      found.push(svg("text.name", { x: x + 2, y: y + 11 }, text));
    }
    return found;
  }

  /** The nearest free place for a name of width `w`, beside its point or in a column above and below that. */
  spot(p, own, w, busy, box) {
    const h = NAME_HEIGHT, spots = [[p.cx + p.r + 4, p.cy - h / 2], [p.cx - p.r - 4 - w, p.cy - h / 2]];
    for (let dy = 16; dy <= 80; dy += 16) {
      for (const y of [p.cy - h / 2 - dy, p.cy - h / 2 + dy]) spots.push([p.cx + p.r + 14, y], [p.cx - p.r - 14 - w, y]);
    }
    return spots.find(([x, y]) => x > box.x0 + 2 && x + w < box.x1 - 2 && y > box.y1 + 2 && y + h < box.y0 - 2
      && busy.every(([a, b, c, d], i) => i === own || x > c || x + w < a || y > d || y + h < b));
  }
}

const tickText = v => v >= 1 ? whole(Math.round(v)) : String(+v.toPrecision(1));
