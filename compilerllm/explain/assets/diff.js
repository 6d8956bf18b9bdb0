// Lines of IR, coloured, and two texts of IR side by side: equal lines aligned, changed words marked.

const IR_TOKEN = /(%[\w.]+)|(@[\w.]+)|("(?:[^"\\]|\\.)*")|(\b(?:bf16|f8e4m3|f16|f32|f64|i8|u8|i16|i32|i64|bool)\b)|(\b[a-z_]\w*(?=\())|(\b(?:func|dim|param|state|return|in)\b)|([\w.+-]+)|(\s+)|(.)/gsu;
const IR_CLASS = ["value", "fn", "string", "type", "op", "word", "", "", ""];
const LONG = 320; // characters, beyond which a line is cut until it is asked for
const CONTEXT = 3; // unchanged lines that stay around a change
const FOLD = 5; // unchanged lines that are worth folding
const MOST_EDITS = 2500; // beyond which two functions are shown as replaced

function tokens(line) {
  return [...line.matchAll(IR_TOKEN)].map(m => ({ text: m[0], kind: IR_CLASS[m.slice(1).findIndex(g => g !== undefined)] }));
}

/** One line of IR as an element. `changed`: a flag a token. */
function irLine(line, changed) {
  const code = el("code.line");
  const fill = limit => {
    let used = 0;
    const parts = [];
    const all = tokens(line);
    for (let i = 0; i < all.length && used < limit; i++) {
      const t = all[i], mark = changed && changed[i];
      parts.push(t.kind || mark ? el(`span${t.kind ? `.${t.kind}` : ""}${mark ? ".changed" : ""}`, {}, t.text) : t.text);
      used += t.text.length;
    }
    code.replaceChildren(...parts);
    if (used < line.length) {
      code.append(el("button.more", { type: "button", onclick: () => fill(Infinity) }, `${whole(line.length - used)} more characters`));
    }
  };
  fill(line.length > LONG ? LONG * 0.75 : Infinity);
  return code;
}

/** A module's text by function: name to lines, what origins say cut off. */
function functionsOf(text) {
  const found = new Map();
  let lines = null;
  for (const full of text.split("\n")) {
    const line = full.replace(/\s+#! .*$/, "").replace(/\s+$/, "");
    const head = /^func @([^\s(]+)/.exec(line);
    if (head) found.set(head[1], lines = []);
    if (!lines && line) found.set("", lines = []);
    if (lines && (line || lines.length)) lines.push(line);
  }
  for (const body of found.values()) while (body.length && !body.at(-1)) body.pop();
  return found;
}

/** Pairs of places [a, b] of a longest common subsequence, in order (Myers 1986). Null where the two differ too much. */
function common(a, b) {
  let start = 0, enda = a.length, endb = b.length;
  while (start < enda && start < endb && a[start] === b[start]) start++;
  while (enda > start && endb > start && a[enda - 1] === b[endb - 1]) { enda--; endb--; }
  const n = enda - start, m = endb - start;
  const pairs = [];
  for (let i = 0; i < start; i++) pairs.push([i, i]);
  const middle = n && m ? shortestEdit(a, b, start, n, m) : [];
  if (!middle) return null;
  pairs.push(...middle);
  for (let i = 0; i < a.length - enda; i++) pairs.push([enda + i, endb + i]);
  return pairs;
}

function shortestEdit(a, b, start, n, m) {
  const most = Math.min(n + m, MOST_EDITS), trace = [];
  let v = new Int32Array(2 * most + 3);
  const mid = most + 1;
  for (let d = 0; d <= most; d++) {
    trace.push(v.slice(mid - d - 1, mid + d + 2));
    for (let k = -d; k <= d; k += 2) {
      let x = k === -d || (k !== d && v[mid + k - 1] < v[mid + k + 1]) ? v[mid + k + 1] : v[mid + k - 1] + 1;
      let y = x - k;
      while (x < n && y < m && a[start + x] === b[start + y]) { x++; y++; }
      v[mid + k] = x;
      if (x >= n && y >= m) return backtrack(trace, start, n, m, d);
    }
  }
  return null;
}

function backtrack(trace, start, x, y, last) {
  const pairs = [];
  for (let d = last; d > 0; d--) {
    const v = trace[d], at = k => v[k + d + 1], k = x - y;
    const from = k === -d || (k !== d && at(k - 1) < at(k + 1)) ? k + 1 : k - 1;
    const px = at(from), py = px - from;
    while (x > px && y > py) pairs.push([start + --x, start + --y]);
    [x, y] = [px, py];
  }
  while (x > 0 && y > 0) pairs.push([start + --x, start + --y]);
  return pairs.reverse();
}

/** Rows {kind, a, b}: places in the two texts or null. Kinds: same, changed (both), gone, new. */
function alignLines(a, b) {
  const pairs = common(a, b) || [];
  const rows = [];
  let [x, y] = [0, 0];
  for (const [i, j] of [...pairs, [a.length, b.length]]) {
    rows.push(...alignHunk(a, b, x, i, y, j));
    if (i < a.length) rows.push({ kind: "same", a: i, b: j });
    [x, y] = [i + 1, j + 1];
  }
  return rows;
}

/** Within a changed stretch: lines that resemble each other stand beside each other. */
function alignHunk(a, b, a0, a1, b0, b1) {
  const n = a1 - a0, m = b1 - b0, rows = [];
  const gone = i => rows.push({ kind: "gone", a: i, b: null }), fresh = j => rows.push({ kind: "new", a: null, b: j });
  if (!n || !m || n * m > 40000) {
    for (let i = a0; i < a1; i++) gone(i);
    for (let j = b0; j < b1; j++) fresh(j);
    return rows;
  }
  const bag = line => new Set(tokens(line).map(t => t.text).filter(t => /\w/.test(t)));
  const [left, right] = [a.slice(a0, a1).map(bag), b.slice(b0, b1).map(bag)];
  const alike = (i, j) => {
    let both = 0;
    for (const t of left[i]) if (right[j].has(t)) both++;
    const share = 2 * both / (left[i].size + right[j].size || 1);
    return share > 0.45 ? share : 0;
  };
  const best = Array.from({ length: n + 1 }, () => new Float64Array(m + 1)), score = [];
  for (let i = n - 1; i >= 0; i--) {
    score[i] = Float64Array.from({ length: m }, (_, j) => alike(i, j));
    for (let j = m - 1; j >= 0; j--) {
      best[i][j] = Math.max(best[i + 1][j], best[i][j + 1], score[i][j] ? score[i][j] + best[i + 1][j + 1] : 0);
    }
  }
  let [i, j] = [0, 0];
  while (i < n && j < m) {
    if (score[i][j] && best[i][j] === score[i][j] + best[i + 1][j + 1]) {
      rows.push({ kind: "changed", a: a0 + i++, b: b0 + j++ });
    } else if (best[i][j] === best[i + 1][j]) gone(a0 + i++);
    else fresh(b0 + j++);
  }
  while (i < n) gone(a0 + i++);
  while (j < m) fresh(b0 + j++);
  return rows;
}

/** Which tokens of two lines differ, a flag each. */
function changedTokens(one, two) {
  const [a, b] = [one, two].map(line => tokens(line).map(t => t.text));
  const pairs = common(a, b) || [];
  const flags = [a.map(() => true), b.map(() => true)];
  for (const [i, j] of pairs) flags[0][i] = flags[1][j] = false;
  return flags.map((f, side) => f.map((on, i) => on && /\S/.test((side ? b : a)[i])));
}

/** Two versions of a function as a table. `line`: text to jump to, whose fold is then open. */
function diffTable(before, after, line) {
  const rows = alignLines(before, after);
  const body = el("tbody");
  const isHit = r => line && ((r.b !== null && after[r.b] === line) || (r.b === null && before[r.a] === line));
  for (let i = 0; i < rows.length;) {
    let j = i;
    while (j < rows.length && rows[j].kind === "same") j++;
    const head = i === 0 ? 1 : CONTEXT, tail = j === rows.length ? 0 : CONTEXT;
    const inside = rows.slice(i + head, j - tail);
    if (j - i - head - tail >= FOLD && !inside.some(isHit)) {
      const draw = rs => rs.map(r => diffRow(r, before, after, isHit(r)));
      const label = `${whole(inside.length)} unchanged lines`;
      const fold = el("tr.fold", {}, el("td", { colspan: 4 }, el("button", { type: "button" }, label)));
      fold.querySelector("button").addEventListener("click", () => fold.replaceWith(...draw(inside)));
      body.append(...draw(rows.slice(i, i + head)), fold, ...draw(rows.slice(j - tail, j)));
    } else {
      body.append(...rows.slice(i, j).map(r => diffRow(r, before, after, isHit(r))));
    }
    if (j < rows.length) body.append(diffRow(rows[j], before, after, isHit(rows[j])));
    i = j + 1;
  }
  return el("table.diff", {}, el("colgroup", {}, el("col.no"), el("col"), el("col.no"), el("col")), el("thead.unseen", {},
    el("tr", {}, ["line before", "before", "line after", "after"].map(t => el("th", { scope: "col" }, t)))), body);
}

function diffRow(row, before, after, hit) {
  const [x, y] = [row.a === null ? null : before[row.a], row.b === null ? null : after[row.b]];
  const flags = row.kind === "changed" ? changedTokens(x, y) : [null, null];
  const side = (at, line, flag, name) => [
    el(`td.no.${name}`, {}, line === null ? "" : String(at + 1)), el(`td.${name}`, {}, line === null ? "" : irLine(line, flag)),
  ];
  return el(`tr.${row.kind}${hit ? ".hit" : ""}`, {}, side(row.a, x, flags[0], "before"), side(row.b, y, flags[1], "after"));
}
