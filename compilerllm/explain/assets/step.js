// The view of one bucket's step: what it is, its figures, timeline, roofline and table, all lit together.

/** Light up a row everywhere it is drawn; null puts the light out. */
function highlight(id) {
  const root = byId("step");
  root.querySelectorAll(".lit").forEach(e => e.classList.remove("lit"));
  root.classList.toggle("dimmed", id !== null);
  if (id !== null) root.querySelectorAll(`[data-row="${CSS.escape(id)}"]`).forEach(e => e.classList.add("lit"));
}

/** Open a row in the table and go there. */
function openRow(id, bucket) {
  hideTip();
  highlight(null);
  go({ view: "step", bucket, only: null, kernel: id });
  view.table.open(id, true);
}

class StepView {
  constructor(model, root) {
    this.model = model;
    this.root = root;
    const { buckets } = model.report;
    if (!buckets.length) {
      root.append(el("div.panel", {}, el("p.empty", {}, "This build has no kernels: its graph is run node by node. Passes and near misses are all there is.")));
      return;
    }
    const kinds = [["decode", "Decode"], ["mixed", "With prompts"], ["sampling", "Sampling"]];
    const known = new Set(kinds.map(k => k[0]));
    for (const b of buckets) if (!known.has(b.kind)) { kinds.push([b.kind, b.kind]); known.add(b.kind); }
    this.chooser = el("select", { id: "bucket", "aria-label": "Bucket", onchange: e => go({ bucket: e.target.value, kernel: null }) },
      kinds.map(([kind, label]) => {
        const of = buckets.filter(b => b.kind === kind);
        return of.length ? el("optgroup", { label }, of.map(b => el("option", { value: b.name }, b.name))) : null;
      }));
    const next = (by, label, sign) => el("button.quiet", { type: "button", "aria-label": label, title: label, onclick: () => this.turn(by) }, sign);
    this.basisButtons = ["measured", "predicted"].map(name =>
      el("button", { type: "button", "data-basis": name, onclick: () => go({ time: name === "predicted" ? name : null }, true) }, name));
    this.about = el("p.muted.about");
    this.stats = el("dl.stats", { id: "stats" });
    const parts = ["panel", "panel", "panel"].map(name => el(`div.${name}`));
    root.append(
      el("div.panel", {}, el("div.heading", {}, el("h2", {}, el("label", { for: "bucket" }, "Bucket")), el("span.chooser", {},
        next(-1, "The bucket before", "‹"), this.chooser, next(1, "The next bucket", "›")),
        this.about, el("span.grow"), el("div.switch", { role: "group", "aria-label": "Times to go by" }, this.basisButtons)), this.stats,
        bucketTable(model)),
      ...parts);
    this.timeline = new Timeline(model, parts[0]);
    this.roofline = new Roofline(model, parts[1]);
    this.table = new KernelTable(model, parts[2]);
    watch(["bucket", "time", "view"], () => this.draw());
    watch(["sort", "only"], () => this.bucket && this.table.draw(this.bucket, this.basis));
    watch(["kernel"], () => this.bucket && this.table.open(state.kernel, false));
  }

  turn(by) {
    const names = this.model.report.buckets.map(b => b.name);
    const at = (names.indexOf(this.bucket.name) + by + names.length) % names.length;
    go({ bucket: names[at], kernel: null });
  }

  draw() {
    if (this.root.hidden || !this.table) return;
    const bucket = this.model.bucket(state.bucket), basis = this.model.basis(bucket, state.time);
    if (bucket === this.bucket && basis === this.basis) return;
    [this.bucket, this.basis] = [bucket, basis];
    this.chooser.value = bucket.name;
    for (const b of this.basisButtons) {
      const name = b.dataset.basis;
      b.setAttribute("aria-pressed", String(name === basis));
      b.disabled = name === "measured" && !this.model.hasTimes(bucket);
      b.title = b.disabled ? "No times were measured for this bucket" : "";
    }
    const [t, s, r, q] = bucket.bounds;
    const size = bucket.kind === "sampling" ? `${count(bucket.rows, "row")} of logits`
      : `a step of ${count(bucket.tokens, "token")}, ${count(bucket.sequences, "sequence")}, ${count(bucket.rows, "row")} sampled, context ${whole(bucket.context)}`;
    const follows = this.model.report.buckets.find(b => b.name === bucket.sampling);
    this.about.replaceChildren(el("span", { title: `the bucket's bounds: T ${t}, S ${s}, R ${r}, longest query ${q}` }, size),
      ...follows ? [", then ", el("button.link", { type: "button", onclick: () => go({ bucket: follows.name, kernel: null }) }, follows.name)] : []);
    this.figures(bucket, basis);
    hideTip();
    highlight(null);
    this.timeline.draw(bucket, basis);
    this.roofline.draw(bucket, basis);
    this.table.draw(bucket, basis);
  }

  figures(bucket, basis) {
    const { launches, measured } = bucket, rows = this.model.rows(bucket);
    const of = name => sum(launches[name], x => x || 0);
    const items = [
      ["predicted", time(of("predicted_us")), of("predicted_us")],
      measured ? ["measured", time(measured.wall_us), measured.wall_us, `middle half of ${whole(measured.repeats)} runs`]
        : this.model.hasTimes(bucket) ? ["measured", time(of("measured_us")), of("measured_us"), "sum of the kernels"] : null,
      ["roofline", time(of("roofline_us")), of("roofline_us"), `${percent(of("roofline_us") / this.model.stepTime(bucket, basis))} of ${basis}`],
      measured ? ["unattributed", percent(measured.unattributed_us / measured.wall_us), measured.unattributed_us, time(measured.unattributed_us)] : null,
      ["moves", bytes(of("nbytes")), of("nbytes")],
      ["computes", flops(of("flops")), of("flops")],
      ["launches", whole(launches.kernel.length), launches.kernel.length, `${count(new Set(launches.kernel).size, "distinct kernel")}`],
      ["arena", bytes(bucket.arena_bytes), bucket.arena_bytes],
    ];
    this.stats.replaceChildren(...items.filter(Boolean).map(([name, text, value, more]) =>
      el("div", { "data-stat": name, "data-value": value }, el("dt", {}, name), el("dd", {}, text), more ? el("small", {}, more) : "")));
    this.rowsCount = rows.length;
  }
}

/** Every bucket in a line, drawn when it is first opened. */
function bucketTable(model) {
  const { buckets } = model.report, measured = buckets.some(b => b.measured);
  const of = (b, name) => sum(b.launches[name], x => x || 0);
  const columns = [
    ["Bucket", null], ["Tokens", b => whole(b.tokens)], ["Sequences", b => whole(b.sequences), "wide"],
    ["Context", b => b.context ? whole(b.context) : "–", "wide"], ["Launches", b => whole(b.launches.kernel.length), "wide"],
    ["Bytes", b => bytes(of(b, "nbytes")), "wide"], ["Flops", b => flops(of(b, "flops")).replace(/flop$/, "").trim(), "wide"],
    ["Roofline µs", b => number(of(b, "roofline_us"))], ["Predicted µs", b => number(of(b, "predicted_us"))],
    ...measured ? [["Measured µs", b => b.measured ? number(b.measured.wall_us) : "–"],
      ["Unattributed", b => b.measured ? percent(b.measured.unattributed_us / b.measured.wall_us) : "–", "wide"]] : [],
  ];
  const line = b => el("tr", { "data-bucket": b.name }, columns.map(([, show, wide]) => show
    ? el(`td.num${wide ? ".wide" : ""}`, {}, show(b))
    : el("td", {}, el("button.link", { type: "button", onclick: () => go({ bucket: b.name, kernel: null }) }, b.name))));
  const fill = box => box.querySelector("table") || box.append(el("table.buckets", {},
    el("thead", {}, el("tr", {}, columns.map(([name, show, wide]) =>
      el(`th${show ? ".num" : ""}${wide ? ".wide" : ""}`, { scope: "col" }, name)))),
    el("tbody", {}, buckets.map(line))));
  return el("details.all", { ontoggle: e => e.target.open && fill(e.target) }, el("summary", {}, `All ${count(buckets.length, "bucket")}`));
}
