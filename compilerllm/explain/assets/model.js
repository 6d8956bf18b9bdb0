// From the report's launches to what is shown: rows of equal kernels, their colours, the time they are held against.

const FAMILIES = [
  ["attention", "attention", /attention|decode|prefill|qkv|rope|kv_write/],
  ["experts", "experts", /expert|route|moe/],
  ["sampling", "sampling", /sampl|argmax|top_?k|logprob|penalt/],
  ["linear", "linear", /linear|matmul|gemm|gemv/],
  ["norm", "norm", /norm/],
  ["memory", "copies, lookups", /embed|gather|copy|cast|concat|slice|step_field|table|permute|reshape/],
  ["pointwise", "pointwise", /group|pointwise|add|mul|act|softcap/],
  ["other", "other", /./],
];

/** A colour's name, by what the node does. */
function familyOf(op, family) {
  return (FAMILIES.find(f => f[2].test(op)) || FAMILIES.find(f => f[2].test(family)) || FAMILIES[7])[0];
}

class Model {
  constructor(report) {
    this.report = report;
    this.rowsOf = new Map();
    this.ridge = report.machine.bandwidth ? report.machine.tflops * 1e3 / report.machine.bandwidth : 0;
  }

  bucket(name) {
    return this.report.buckets.find(b => b.name === name) || this.report.buckets[0];
  }

  /** Launches of the same kernel for like nodes are one row; rows stand in the order of their first launch. */
  rows(bucket) {
    if (this.rowsOf.has(bucket.name)) return this.rowsOf.get(bucket.name);
    const { kernel, node, pick, nbytes, flops, roofline_us, predicted_us, measured_us } = bucket.launches;
    const rows = new Map();
    for (let i = 0; i < kernel.length; i++) {
      const n = this.report.nodes[node[i]], path = like(n.path);
      const key = JSON.stringify([kernel[i], n.op, path, n.modules.map(like), pick[i]]);
      if (!rows.has(key)) {
        const k = this.report.kernels[kernel[i]];
        rows.set(key, {
          id: String(i), kernel: k, kernelIndex: kernel[i], op: n.op, path, passes: [], sources: [],
          pick: pick[i] < 0 ? null : this.report.picks[pick[i]], color: familyOf(n.op, k.family), launches: [], nodes: [],
          layers: [], nbytes: 0, flops: 0, roofline: 0, predicted: 0, measured: 0,
        });
      }
      const row = rows.get(key);
      row.launches.push(i);
      row.nodes.push(node[i]);
      if (n.layer >= 0) row.layers.push(n.layer);
      row.passes.push(...n.passes.filter(p => !row.passes.includes(p)));
      row.sources.push(...n.sources.filter(s => !row.sources.includes(s)));
      row.nbytes += nbytes[i];
      row.flops += flops[i];
      row.roofline += roofline_us[i];
      row.predicted += predicted_us[i];
      row.measured = measured_us[i] === null || row.measured === null ? null : row.measured + measured_us[i];
    }
    const found = [...rows.values()];
    for (const row of found) row.layers = [...new Set(row.layers)];
    this.rowsOf.set(bucket.name, found);
    return found;
  }

  hasTimes(bucket) {
    return bucket.launches.measured_us.some(x => x !== null);
  }

  /** "measured" or "predicted": what shares, the plot and the timeline go by. */
  basis(bucket, wanted) {
    return this.hasTimes(bucket) && wanted !== "predicted" ? "measured" : "predicted";
  }

  /** What shares are shares of: the wall time of a measured step, else the sum of the kernels. */
  stepTime(bucket, basis) {
    if (basis === "measured" && bucket.measured) return bucket.measured.wall_us;
    const times = bucket.launches[basis === "measured" ? "measured_us" : "predicted_us"];
    return sum(times, x => x || 0);
  }

  /** The rows of a bucket with their time on that basis and its share of the step. */
  timed(bucket, basis) {
    const total = this.stepTime(bucket, basis);
    return this.rows(bucket).map(r => ({ ...r, time: r[basis] ?? 0, share: total ? (r[basis] ?? 0) / total : 0 }));
  }

  /** Runs of passes that matter to a bucket: those of the whole module, and its own. */
  passIndex(name, bucket) {
    const found = this.report.passes.map((p, i) => [p, i]).filter(([p]) => p.name === name);
    const fits = found.filter(([p]) => p.matches && (!p.buckets.length || p.buckets.includes(bucket.name)));
    return (fits.at(-1) || found.at(-1) || [null, -1])[1];
  }

  /** The op, and what it is about: the modules whose weights it reads, the ops of a group, or the module it is in. */
  rowTitle(row) {
    const about = this.weightsOf(row) || lastName(row.path);
    return about && about !== row.op ? `${row.op} · ${about}` : row.op;
  }

  /** The shorter name, where there is no room for the whole. */
  rowAbout(row) {
    const about = this.weightsOf(row);
    return about && !about.endsWith("norm") ? about : row.op;
  }

  weightsOf(row) {
    const node = this.report.nodes[row.nodes[0]];
    if (node.body.length) return several(node.body);
    const inside = node.modules.some(m => !node.path || m === node.path || m.startsWith(`${node.path}.`));
    const tails = [...new Set(node.modules.map(lastName))].filter(Boolean), main = tails.filter(t => !t.includes("norm"));
    if (!inside) return tails.length ? lastName(node.path) : ""; // tied weights: what reads them says more
    return together(main.length ? main : tails);
  }

  templateName(kernel) {
    return kernel.kind === "triton" ? kernel.template : `${kernel.kind}: ${kernel.template.replace(/^library:/, "")}`;
  }
}

/** A module's path with its numbers left out: equal for like modules of all layers. */
const like = path => path.replace(/(?<=\.)\d+(?=\.|$)/g, "*");

const lastName = path => path.split(".").filter(p => p && !/^(\*|\d+|layers|model)$/.test(p)).at(-1) || "";

/** q_proj, k_proj, v_proj as "q, k, v proj". */
function together(names) {
  const ends = new Set(names.map(n => n.slice(n.lastIndexOf("_"))));
  const end = names.length > 1 && ends.size === 1 && names[0].includes("_") ? [...ends][0] : "";
  return end ? `${several(names.map(n => n.slice(0, -end.length)))} ${end.slice(1)}` : several(names);
}

const several = names => names.length > 4 ? `${names.slice(0, 3).join(", ")} …` : names.join(", ");
