"use strict";
// Adds to the figures what needs a pointer: a crosshair through all of them with the values in the
// legends, dragging to enlarge a part, a double click to go back. The numbers are read from the
// paths. A figure is enlarged by its viewBox; strokes keep their width.
(() => {
  const W = 10000, H = 3000;
  const short = (v) => {
    const a = Math.abs(v);
    if (a >= 1e15 || (a > 0 && a < 1e-3)) return v.toPrecision(3).replace(/\.?0+e/, "e");
    for (const [size, sign] of [[1e12, " T"], [1e9, " B"], [1e6, " M"], [1e4, " k"]])
      if (a >= size) return `${Number((v / (sign === " k" ? 1e3 : size)).toPrecision(3))}${sign}`;
    return Number(v.toPrecision(4)).toLocaleString("en", {maximumFractionDigits: 6});
  };
  const read = (path) => {
    const [x, y, ...rest] = path.getAttribute("d").match(/-?\d+/g).map(Number);
    const points = [[x, y]];
    for (let i = 0; i + 1 < rest.length; i += 2) {
      const [px, py] = points[points.length - 1];
      points.push([px + rest[i], py + rest[i + 1]]);
    }
    return points;
  };
  const ticks = (low, high, most, least = 0) => {
    const rough = Math.max(least, (high - low) / most), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10, 20].map((p) => p * power).find((s) => s >= rough);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n++) found.push(n * step);
    return found;
  };
  const figures = [...document.querySelectorAll(".figure")].map((root) => {
    const plot = root.querySelector(".plot"), svg = plot.querySelector("svg");
    const {x0, x1, y0, y1} = root.dataset;
    const outputs = [...root.querySelectorAll(".entry output")];
    return {
      root, plot, svg, outputs, at: root.querySelector(".at"), across: root.dataset.across,
      last: outputs.map((one) => one.textContent), labels: [...plot.querySelectorAll(".x, .y")],
      named: [...plot.querySelectorAll(".named")],
      lines: [...svg.querySelectorAll(".line")].map(read), box: [0, 0, W, H],
      x: (u) => Number(x0) + u / W * (x1 - x0), y: (v) => Number(y1) - v / H * (y1 - y0),
      u: (value) => (value - x0) / (x1 - x0) * W,
      cross: plot.appendChild(Object.assign(document.createElement("i"), {className: "cross", hidden: true})),
    };
  });
  const nearest = (points, u) => {
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < u) low = middle + 1; else high = middle;
    }
    return low && u - points[low - 1][0] < points[low][0] - u ? points[low - 1] : points[low];
  };
  const show = (value, across) => figures.forEach((f) => {
    const [left, , width] = f.box, u = f.u(value), place = (u - left) / width;
    const inside = f.across === across && value !== null && place >= 0 && place <= 1;
    f.cross.hidden = !inside;
    f.cross.style.left = `${100 * place}%`;
    f.outputs.forEach((one, n) => {
      one.textContent = inside ? short(f.y(nearest(f.lines[n], u)[1])) : f.last[n];
    });
    f.at.textContent = inside ? `${f.across} ${Math.round(f.x(nearest(f.lines[0], u)[0])).toLocaleString("en")}` : "";
  });
  const label = (kind, side, place, text) => {
    const node = document.createElement("i"), inner = document.createElement("b");
    node.className = kind;
    node.style[side] = `${place}%`;
    inner.textContent = text;
    node.append(inner);
    return node;
  };
  const zoom = (f, from, to) => {
    f.plot.querySelectorAll(".x, .y").forEach((one) => one.remove());
    f.named.forEach((one) => { one.hidden = from !== null; });
    if (from === null) {
      f.box = [0, 0, W, H];
      f.plot.prepend(...f.labels);
    } else {
      const seen = f.lines.flat().filter(([u]) => u >= f.u(from) && u <= f.u(to)).map(([, v]) => v);
      const top = Math.min(...seen, H), bottom = Math.max(...seen, -H);
      const edge = Math.max(0.06 * (bottom - top), 3);
      f.box = seen.length ? [f.u(from), top - edge, f.u(to) - f.u(from), bottom - top + 2 * edge]
        : [f.u(from), 0, f.u(to) - f.u(from), H];
      const [left, up, width, height] = f.box;
      const xs = ticks(f.x(left), f.x(left + width), 5, 1).map((v, n) =>
        label(n % 2 ? "x odd" : "x", "left", (f.u(v) - left) / width * 100, short(v)));
      const low = f.y(up + height), high = f.y(up);
      const ys = ticks(low, high, 5).map((v) =>
        label("y", "top", (high - v) / (high - low) * 100, short(v)));
      f.plot.prepend(...ys, ...xs);
    }
    f.svg.setAttribute("viewBox", f.box.join(" "));
  };
  const share = (f, event) => {
    const box = f.svg.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };
  const value = (f, part) => f.x(f.box[0] + part * f.box[2]);
  figures.forEach((f) => {
    let start = null, chosen = null;
    f.svg.addEventListener("pointermove", (event) => {
      const now = share(f, event);
      show(value(f, now), f.across);
      if (chosen) Object.assign(chosen.style, {
        left: `${100 * Math.min(start, now)}%`, width: `${100 * Math.abs(now - start)}%`});
    });
    f.svg.addEventListener("pointerleave", () => { if (start === null) show(null, f.across); });
    f.svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" || event.button) return;
      start = share(f, event);
      f.svg.setPointerCapture(event.pointerId);
      chosen = f.plot.appendChild(Object.assign(document.createElement("i"), {className: "chosen"}));
    });
    f.svg.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const now = share(f, event), from = value(f, Math.min(start, now)), to = value(f, Math.max(start, now));
      const wide = Math.abs(now - start) > 0.01;
      start = null;
      chosen.remove();
      chosen = null;
      if (wide) figures.filter((one) => one.across === f.across).forEach((one) => zoom(one, from, to));
    });
    f.svg.addEventListener("dblclick", () =>
      figures.filter((one) => one.across === f.across).forEach((one) => zoom(one, null)));
  });
})();
