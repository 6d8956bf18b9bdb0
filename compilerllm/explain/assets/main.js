// Start: read the report, draw the card, show what the address asks for.

let view = null;

function drawCard(report) {
  const m = report.machine, names = [
    ["target", m.target], ["chip", m.chip + (m.threads ? `, ${count(m.threads, "thread")}` : "")],
    ["level", `O${report.level}`], ["dtype", report.dtype], ["layers", whole(report.layers)],
    ["reads at", m.bandwidth ? `${number(m.bandwidth)} GB/s` : null], ["computes at", m.tflops ? rate(m.tflops) : null],
    ["a launch takes", m.launch_us ? `${time(m.launch_us)} at least` : null], ["figures", m.source],
    ["version", report.version],
  ];
  const built = Object.entries(report.seconds).filter(([, s]) => s >= 0.05).map(([k, s]) => `${k} ${number(s)} s`).join(", ");
  byId("model").textContent = report.model.replace(/^\/.*\/(?=[^/]+$)/, ""); // of a file's whole path the name
  byId("model").title = report.model;
  byId("card").append(el("div.panel.card", {},
    definitions(names.filter(([, v]) => v)),
    definitions([["artifact", report.artifact ? el("code.id", { title: report.artifact }, report.artifact) : "not built"], ["built in", built]]),
    report.notes.length ? el("ul.notes", {}, report.notes.map(n => el("li", {}, n))) : ""));
  document.title = `${report.model} on ${m.target}, explained`;
}

function showView() {
  const wanted = ["step", "passes", "misses"].includes(state.view) ? state.view : "step";
  hideTip();
  for (const name of ["step", "passes", "misses"]) byId(name).hidden = name !== wanted;
  byId("card").hidden = wanted !== "step";
  for (const a of document.querySelectorAll("nav [data-view]")) {
    a.href = linkTo({ view: a.dataset.view });
    if (a.dataset.view === wanted) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  }
}

function themes() {
  const dark = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement, button = byId("theme");
  const now = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  const draw = () => {
    button.textContent = now() === "dark" ? "☀" : "☾";
    button.title = now() === "dark" ? "Light" : "Dark";
  };
  button.addEventListener("click", () => { root.dataset.theme = now() === "dark" ? "light" : "dark"; draw(); });
  dark.addEventListener("change", draw);
  draw();
}

async function start() {
  themes();
  if (typeof DecompressionStream === "undefined") throw new Error("This browser cannot unpack the report: it needs DecompressionStream (Chrome 80, Firefox 113, Safari 16.4).");
  const model = new Model(await unpack(byId("report").textContent.trim()));
  drawCard(model.report);
  const misses = sum(model.report.passes, p => p.misses.length);
  document.querySelector('[data-view="passes"]').append(el("span.badge", {}, whole(model.report.passes.length)));
  document.querySelector('[data-view="misses"]').append(el("span.badge", {}, whole(misses)));
  watch(["view"], showView);
  Object.assign(state, { view: null, bucket: null, kernel: null, sort: null, only: null, time: null, pass: null, fn: null, line: null,
    miss: null, misspass: null });
  showView();
  const step = new StepView(model, byId("step"));
  view = { model, step, table: step.table, passes: new PassView(model, byId("passes")), misses: new MissView(model, byId("misses")),
    search: new Search(model) };
  readAddress();
  showView();
  view.step.draw();
  view.passes.draw([]);
  view.misses.draw();
  watch(Object.keys(state), () => document.querySelectorAll("nav [data-view]").forEach(a => { a.href = linkTo({ view: a.dataset.view }); }));
  addEventListener("popstate", readAddress);
  addEventListener("hashchange", readAddress);
  if (state.kernel !== null && view.table) view.table.open(state.kernel, true);
  document.body.dataset.ready = "yes";
}

start().catch(error => {
  byId("main").prepend(el("p.notice", { role: "alert" }, String(error.message || error)));
  throw error;
});
