"use strict";
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)").matches; // a finger that drags wants to scroll the page
  const config = { responsive: true, displayModeBar: false };
  const figures = [];

  let printing = false;
  const ink = () => {
    const style = getComputedStyle(document.documentElement);
    const pick = (name) => style.getPropertyValue(printing ? `--print-${name}` : `--${name}`).trim();
    const [text, grid, panel] = [pick("text"), pick("grid"), pick("panel")];
    return { text, grid, hover: { bgcolor: panel, bordercolor: grid, font: { color: text } } };
  };
  const coloured = (layout) => {
    const { text, grid, hover } = ink();
    const axis = (old) => ({ ...old, gridcolor: grid, linecolor: grid, tickcolor: grid });
    return { ...layout, font: { ...layout.font, color: text }, xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis), hoverlabel: hover };
  };

  for (const [id, figure] of Object.entries(page.figures)) {
    const div = document.getElementById(id);
    figure.layout.dragmode = coarse ? false : "zoom";
    figures.push([div, figure]);
    Plotly.newPlot(div, figure.data, coloured(figure.layout), config);
  }

  // The timeline. Zoomed in, a bar is a span; zoomed out, a lane is cut into columns that show how the time was shared.
  const DOINGS = ["compute", "late", "wait", "communicate", "done, until the job ends", "dead"];
  const COLOURS = ["#0072B2", "#D55E00", "#F0E442", "#56B4E9", "#999999", "#CC79A7"];
  const HEIGHTS = [0.8, 0.8, 0.4, 0.6, 0.2, 0.1]; // also without colours: what is not work is thinner
  const PATTERNS = ["", "/", "", "x", ".", ""];
  const MOST_BARS = 1200, COLUMNS = 160, MOST_LINKS = 120;
  const div = document.getElementById("timeline");
  const choice = document.getElementById("timeline-run");
  const note = document.getElementById("timeline-note");

  const seconds = (us) => us >= 1e6 ? `${(us / 1e6).toPrecision(3)} s` : us >= 1e3 ? `${(us / 1e3).toPrecision(3)} ms` : `${us} µs`;

  function index(run) { // the place in the columns where each lane begins
    run.begin = new Array(run.workers + 1).fill(run.rank.length);
    for (let i = run.rank.length - 1; i >= 0; i--) run.begin[run.rank[i]] = i;
    for (let r = run.workers - 1; r >= 0; r--) run.begin[r] = Math.min(run.begin[r], run.begin[r + 1]);
    run.end = 0;
    run.start.forEach((s, i) => { run.end = Math.max(run.end, s + run.length[i]); });
  }

  function visible(run, from, to) {
    const ranges = [];
    let count = 0;
    for (let rank = 0; rank < run.workers; rank++) {
      let lo = run.begin[rank], hi = run.begin[rank + 1];
      const last = hi;
      while (lo < hi) { const mid = (lo + hi) >> 1; if (run.start[mid] + run.length[mid] < from) lo = mid + 1; else hi = mid; }
      let end = lo;
      while (end < last && run.start[end] <= to) end++;
      ranges.push([lo, end]);
      count += end - lo;
    }
    return [ranges, count];
  }

  function bars(run, from, to) {
    const made = DOINGS.map((name, k) => ({
      type: "bar", name, x: [], y: [], base: [], width: [], customdata: [], hovertemplate: "%{customdata}<extra></extra>",
      marker: { color: COLOURS[k], line: { width: 0 }, pattern: { shape: PATTERNS[k], size: 6, fillmode: "overlay", fgcolor: "#ffffff", fgopacity: 0.6 } },
    }));
    const add = (k, x, width, base, y, text) => {
      const bar = made[k];
      bar.x.push(x / 1e6); bar.width.push(width / 1e6); bar.base.push(base); bar.y.push(y); bar.customdata.push(text);
    };
    const [ranges, count] = visible(run, from, to);
    const detailed = count <= MOST_BARS;
    ranges.forEach(([lo, end], rank) => {
      if (detailed) {
        for (let i = lo; i < end; i++) {
          const k = run.doing[i], h = HEIGHTS[k];
          const text = `rank ${rank}${run.step[i] < 0 ? "" : `, step ${run.step[i]}`}<br>${DOINGS[k]} ${seconds(run.length[i])}<br>from ${seconds(run.start[i])}`;
          add(k, run.start[i] + run.length[i] / 2, run.length[i], rank - h / 2, h, text);
        }
        return;
      }
      const column = (to - from) / COLUMNS, shares = Array.from({ length: COLUMNS }, () => DOINGS.map(() => 0));
      for (let i = lo; i < end; i++) {
        const a = Math.max(run.start[i], from), b = Math.min(run.start[i] + run.length[i], to);
        for (let c = Math.floor((a - from) / column); c < COLUMNS && from + c * column < b; c++)
          shares[c][run.doing[i]] += Math.max(Math.min(b, from + (c + 1) * column) - Math.max(a, from + c * column), 0);
      }
      shares.forEach((share, c) => {
        let base = rank + 0.4;
        const middle = from + (c + 0.5) * column;
        const said = share.map((us, k) => [us / column, DOINGS[k]]).filter(([s]) => s > 0.005)
          .map(([s, name]) => `${name} ${Math.round(100 * s)} %`).join("<br>");
        share.forEach((us, k) => {
          const h = 0.8 * us / column;
          if (h > 0.002) { base -= h; add(k, middle, column, base, h, `rank ${rank} around ${seconds(Math.round(middle))}<br>${said}`); }
        });
      });
    });
    return [made, detailed];
  }

  function links(run, from, to) {
    const seen = run.rounds.filter(([end]) => end >= from && end <= to);
    const line = { type: "scatter", mode: "lines", name: "round", x: [], y: [], hoverinfo: "skip", line: { color: ink().text, width: 1 } };
    const dots = { type: "scatter", mode: "markers", name: "round", showlegend: false, x: [], y: [], customdata: [],
      hovertemplate: "%{customdata}<extra></extra>",
      marker: { size: 6, color: ink().text, symbol: [], line: { width: 1.5, color: ink().text } } };
    if (seen.length > MOST_LINKS) return [line, dots, false];
    for (const [end, version, by, members, fresh, ages] of seen) {
      line.x.push(end / 1e6, end / 1e6, null);
      line.y.push(members[0], members[members.length - 1], null);
      const late = members.filter((_, k) => !fresh[k]).map((r) => `rank ${r}${ages[members.indexOf(r)] > 0 ? ` (${ages[members.indexOf(r)]} old)` : ""}`);
      const text = `round ${version}, begun by rank ${by}<br>fresh: ${members.filter((_, k) => fresh[k]).join(", ") || "nobody"}` +
        (late.length ? `<br>not fresh: ${late.join(", ")}` : "");
      members.forEach((rank, k) => {
        dots.x.push(end / 1e6); dots.y.push(rank); dots.customdata.push(text);
        dots.marker.symbol.push(fresh[k] ? "circle" : "circle-open");
      });
    }
    return [line, dots, true];
  }

  function layout(run, from, to) {
    const narrow = div.clientWidth < 500;
    return {
      barmode: "overlay", bargap: 0, hovermode: "closest", dragmode: coarse ? "pan" : "zoom", uirevision: run.label,
      margin: { l: narrow ? 34 : 64, r: 8, t: 8, b: 44 }, height: Math.min(140 + 46 * run.workers, 720),
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 13 },
      legend: { orientation: "h", yanchor: "bottom", y: 1.02, x: 0 },
      xaxis: { title: { text: "time (s)" }, range: [from / 1e6, to / 1e6], zeroline: false },
      yaxis: { range: [run.workers - 0.45, -0.55], tickprefix: narrow ? "" : "rank ", fixedrange: true, zeroline: false, showgrid: false,
        tickmode: run.workers <= 32 ? "linear" : "auto", dtick: run.workers <= 32 ? 1 : undefined },
    };
  }

  let current = null, view = [0, 1];
  function draw(from, to) {
    const least = 200;
    from = Math.max(0, Math.min(from, current.end - least));
    to = Math.min(Math.max(to, from + least), current.end * 1.02);
    view = [from, to];
    const [made, detailed] = bars(current, from, to);
    const [line, dots, linked] = links(current, from, to);
    const told = [current.note];
    if (!detailed) told.push("Zoomed out, a column shows how each worker's time was shared; zoom in for single steps.");
    if (!linked) told.push("Zoom in to see the rounds.");
    note.textContent = told.filter(Boolean).join(" ");
    return Plotly.react(div, [...made, line, dots], coloured(layout(current, from, to)), config);
  }

  const runs = page.lanes;
  if (runs.length) {
    runs.forEach((run, k) => { index(run); choice.add(new Option(run.label, k)); });
    const part = div.clientWidth < 500 ? 0.4 : 1; // fewer steps where there is less room
    const show = () => { current = runs[choice.value]; return draw(0, current.window * part * 1e6); };
    show();
    choice.addEventListener("change", show);
    div.on("plotly_relayout", (change) => {
      if ("xaxis.range[0]" in change) draw(change["xaxis.range[0]"] * 1e6, change["xaxis.range[1]"] * 1e6);
      else if (change["xaxis.autorange"]) draw(0, current.end * 1.02);
    });
    const move = { whole: () => [0, current.end * 1.02], in: (a, b) => [a + (b - a) / 4, b - (b - a) / 4],
      out: (a, b) => [a - (b - a) / 2, b + (b - a) / 2], left: (a, b) => [a - (b - a) / 2, a + (b - a) / 2],
      right: (a, b) => [a + (b - a) / 2, b + (b - a) / 2] };
    for (const button of document.querySelectorAll("[data-move]"))
      button.addEventListener("click", () => draw(...move[button.dataset.move](...view)));
  }

  const repaint = () => {
    for (const [div, figure] of figures) Plotly.react(div, figure.data, coloured(figure.layout), config);
    if (current) draw(...view);
  };
  dark.addEventListener("change", repaint);
  addEventListener("beforeprint", () => { printing = true; repaint(); });
  addEventListener("afterprint", () => { printing = false; repaint(); });
  document.documentElement.dataset.ready = Math.round(performance.now()); // ms since the page was asked for
})();
