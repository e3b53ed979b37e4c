"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const said = document.getElementById("said");
  const WHOLE = 0, PARTIAL = 1, MERGE = 2, MANY = 3;
  const KINDS = ["whole", "partial", "merge", "many"];
  const HUES = Number(getComputedStyle(document.documentElement).getPropertyValue("--hues"));

  // Where each tile begins in the iteration space.
  const begins = [0];
  for (const [n, count] of data.tiles) {
    for (let i = 0; i < count; i++) begins.push(begins[begins.length - 1] + n);
  }
  const numTiles = begins.length - 1;
  const total = begins[numTiles];

  const format = (x) => x.toLocaleString("en", { maximumFractionDigits: x < 100 ? 2 : 0 });
  const plural = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

  function tileName(tile) {
    const [outer, inner, count] = data.names;
    if (!inner) return `tile ${tile}`;
    return `tile ${tile} (${outer} ${Math.floor(tile / count)}, ${inner} ${tile % count})`;
  }

  function path(svg, name, d) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", "path");
    element.setAttribute("class", name);
    element.setAttribute("d", d);
    svg.append(element);
    return element;
  }

  const box = (x0, x1, y0, y1) => `M${x0} ${y0}H${x1}V${y1}H${x0}z`;

  // Blocks of one colour are one path: a few elements, however many blocks.
  function paint(svg, boxes) {
    for (const [key, d] of [...boxes].sort()) {
      const [kind, hue] = key.split(" ");
      const element = path(svg, kind, d.join(""));
      if (hue) element.style.fill = `var(--hue${hue})`;
    }
  }

  function add(boxes, kind, tile, d) {
    const key = kind === "whole" || kind === "partial" ? `${kind} ${tile % HUES}` : kind;
    if (!boxes.has(key)) boxes.set(key, []);
    boxes.get(key).push(d);
  }

  // The last index whose value is at most x; values ascend.
  function lastAtMost(length, value, x) {
    let low = 0, high = length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (value(middle) <= x) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  let shown = null; // what the tip says, and where

  function show(text, svg, x, y) {
    shown = [text, svg, x, y];
    tip.textContent = text;
    tip.hidden = false;
    const around = svg.getBoundingClientRect();
    const left = around.left + x * around.width + 14;
    const top = around.top + y * around.height + 16;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
    tip.style.top = `${top + height + 8 > innerHeight ? Math.max(8, top - height - 32) : top}px`;
  }

  const leaving = [];
  function leave() {
    tip.hidden = true;
    shown = null;
    for (const clear of leaving) clear();
  }

  // Pointer and keyboard over a plot. at(x, y): place from fractions of its size; move(place, key): another place or null;
  // enter(place): marks it and returns [text, x, y].
  function explore(svg, at, first, move, enter) {
    let place = null;
    const go = (next) => {
      leave();
      place = next;
      const [text, x, y] = enter(place);
      show(text, svg, x, y);
      return text;
    };
    const say = (next) => { said.textContent = go(next); };
    const point = (event) => {
      const around = svg.getBoundingClientRect();
      const x = (event.clientX - around.left) / around.width;
      const y = (event.clientY - around.top) / around.height;
      if (x < 0 || x >= 1 || y < 0 || y >= 1) return;
      const next = at(x, y);
      if (next === null) return leave();
      go(next);
      show(tip.textContent, svg, x, y);
    };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") leave(); });
    svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) say(place ?? first()); });
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return leave();
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const next = move(place ?? first(), event.key);
      if (next === undefined) return;
      event.preventDefault();
      if (next !== null) say(next);
    });
  }

  function marker(svg, name) {
    const element = path(svg, name, "");
    leaving.push(() => element.setAttribute("d", ""));
    return (d) => element.setAttribute("d", d);
  }

  // A strip of tiles; neighbours too narrow to see are drawn as one.
  function drawStrip(svg, cuts, allCuts) {
    svg.setAttribute("viewBox", `0 0 ${total || 1} 1`);
    svg.classList.toggle("roomy", numTiles < 60);
    const grain = total / 2000;
    const boxes = new Map();
    for (let tile = 0; tile < numTiles;) {
      let next = tile + 1;
      while (next < numTiles && begins[next + 1] - begins[tile] <= grain) next++;
      if (begins[next] > begins[tile]) {
        const kind = next > tile + 1 ? "many" : "whole";
        add(boxes, kind, tile, box(begins[tile], begins[next], 0, 1));
      }
      tile = next;
    }
    paint(svg, boxes);
    let last = -Infinity; // of those drawn: closer ones would be a blot
    const apart = cuts.filter((cut) => cut - last >= total / 250 && (last = cut, true));
    if (apart.length) path(svg, "cuts", apart.map((cut) => `M${cut} 0.5V1`).join(""));
    const here = marker(svg, "here");
    const tileAt = (x) => Math.min(lastAtMost(begins.length, (i) => begins[i], x * total), numTiles - 1);
    const move = (tile, key) => {
      const to = { ArrowLeft: tile - 1, ArrowRight: tile + 1, Home: 0, End: numTiles - 1 }[key];
      if (to === undefined) return undefined;
      return to >= 0 && to < numTiles ? to : null;
    };
    const inside = (tile) => {
      const from = lastAtMost(cuts.length, (i) => cuts[i], begins[tile]) + 1;
      return lastAtMost(cuts.length, (i) => cuts[i], begins[tile + 1] - 0.5) + 1 - from;
    };
    const enter = (tile) => {
      here(box(begins[tile], begins[tile + 1], 0, 1));
      const n = begins[tile + 1] - begins[tile];
      const cut = allCuts ? inside(tile) : 0;
      const text = `${tileName(tile)}\n${plural(n, "iteration")}${cut ? `, cut in ${cut + 1}` : ""}`;
      return [text, (begins[tile] + n / 2) / total, 0.5];
    };
    if (total) explore(svg, (x) => tileAt(x), () => 0, move, enter);
    return here;
  }

  function drawTimeline(figure, panel) {
    const svg = figure.querySelector(".timeline");
    const rows = panel.rows;
    const room = rows.length > 48 ? 0 : 0.08;
    const longest = Math.max(1, ...rows.map((row) => row.length));
    const least = rows.length > 24 ? 280 : 90;
    const height = Math.min(Math.max(rows.length * (rows.length > 24 ? 2.4 : 14), least), 420);
    svg.style.setProperty("--height", `${height}px`);
    svg.classList.toggle("roomy", longest < 80 && height > 5 * rows.length);
    const boxes = new Map();
    const kin = new Map(); // boxes of each tile
    rows.forEach((row, y) => row.forEach((block) => {
      const d = box(block[4], block[5], y + room, y + 1 - room);
      add(boxes, KINDS[block[0]], block[1], d);
      if (block[0] !== MANY) {
        if (!kin.has(block[1])) kin.set(block[1], []);
        kin.get(block[1]).push(d);
      }
    }));
    paint(svg, boxes);
    const over = path(svg, "over", "");
    path(svg, "end", `M${panel.makespan} 0V${rows.length}`);
    const markKin = marker(svg, "kin");
    const markHere = marker(svg, "here");
    const markStrip = drawStrip(figure.querySelector(".strip"), panel.cuts, panel.allCuts);
    let span = 1;

    const describe = ([y, i]) => {
      const worker = `worker ${panel.workers[y]}`;
      const block = rows[y][i];
      if (!block) {
        const since = rows[y].length ? rows[y][rows[y].length - 1][5] : 0;
        return `${worker}\nidle from ${format(since)} to ${format(panel.makespan)}`;
      }
      const [kind, tile, begin, end, start, stop, parts] = block;
      const cost = `${format(stop - start)} ${data.unit}, from ${format(start)} to ${format(stop)}`;
      if (kind === MANY) return `${worker}\n${plural(tile, "step")}, from tile ${begin} to tile ${end}\n${cost}`;
      if (kind === MERGE) return `${worker} merges ${plural(begin, "partial")}\n${tileName(tile)}\n${cost}`;
      const n = begins[tile + 1] - begins[tile];
      const which = kind === WHOLE ? `all ${plural(n, "iteration")}` : `iterations ${begin} to ${end - 1} of ${n}, one of ${parts} parts`;
      return `${worker}\n${tileName(tile)}\n${which}\n${cost}`;
    };
    const enter = (place) => {
      const [y, i] = place;
      const block = rows[y][i];
      const start = block ? block[4] : rows[y].length ? rows[y][rows[y].length - 1][5] : 0;
      const stop = block ? block[5] : panel.makespan;
      markHere(box(start, stop, y, y + 1));
      if (block && block[0] !== MANY) {
        markKin(kin.get(block[1]).join(""));
        const merging = block[0] === MERGE;
        const from = begins[block[1]];
        markStrip(box(merging ? from : from + block[2], merging ? begins[block[1] + 1] : from + block[3], 0, 1));
      }
      return [describe(place), Math.min((start + stop) / 2 / span, 1), (y + 1) / rows.length];
    };
    const blockAt = (y, time) => {
      const i = lastAtMost(rows[y].length, (j) => rows[y][j][4], time);
      if (i < 0) return rows[y].length ? [y, 0] : [y, rows[y].length];
      return time > rows[y][i][5] && i === rows[y].length - 1 ? [y, rows[y].length] : [y, i];
    };
    const at = (x, y) => {
      const time = x * span;
      return rows.length && time <= panel.makespan ? blockAt(Math.floor(y * rows.length), time) : null;
    };
    const move = ([y, i], key) => {
      const last = rows[y].length - 1;
      const time = i <= last ? (rows[y][i][4] + rows[y][i][5]) / 2 : panel.makespan;
      switch (key) {
        case "ArrowLeft": return i > 0 ? [y, i - 1] : null;
        case "ArrowRight": return i < last ? [y, i + 1] : null;
        case "ArrowUp": return y > 0 ? blockAt(y - 1, time) : null;
        case "ArrowDown": return y < rows.length - 1 ? blockAt(y + 1, time) : null;
        case "PageUp": return blockAt(Math.max(y - 10, 0), time);
        case "PageDown": return blockAt(Math.min(y + 10, rows.length - 1), time);
        case "Home": return [y, 0];
        case "End": return [y, Math.max(last, 0)];
        default: return undefined;
      }
    };
    if (rows.length) explore(svg, at, () => [0, 0], move, enter);

    return (newSpan) => {
      span = newSpan;
      svg.setAttribute("viewBox", `0 0 ${span} ${Math.max(rows.length, 1)}`);
      over.setAttribute("d", panel.makespan < span ? box(panel.makespan, span, 0, rows.length) : "");
      figure.classList.toggle("beyond", panel.makespan > span);
      drawAxis(figure.querySelector(".axis"), span);
    };
  }

  function drawAxis(axis, span) {
    const rough = span / 4;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    axis.replaceChildren();
    for (let time = 0; time < 0.95 * span; time += step) {
      const label = document.createElement("span");
      label.style.left = `${(100 * time) / span}%`;
      label.textContent = format(time);
      axis.append(label);
    }
  }

  const makespans = data.panels.map((panel) => panel.makespan);
  drawStrip(document.getElementById("tiles"), [], true);
  const panels = [...document.querySelectorAll("figure")].map((figure, i) => [drawTimeline(figure, data.panels[i]), data.panels[i]]);
  function setSpan(axis) {
    leave();
    const all = { shared: Math.max(...makespans), shortest: Math.min(...makespans) }[axis];
    for (const [draw, panel] of panels) draw(((all ?? panel.makespan) || 1) * 1.01);
  }
  const choice = document.querySelector("fieldset");
  setSpan(choice.querySelector("input:checked").value);
  choice.hidden = panels.length < 2;
  choice.addEventListener("change", (event) => setSpan(event.target.value));
  addEventListener("scroll", () => { if (shown) show(...shown); }, { passive: true });
  addEventListener("pointerdown", (event) => { if (!event.target.closest("svg.timeline, svg.strip")) leave(); });
})();
