"""What follows the pointer over a plot: the values at its place. The page is whole without it.

A script and not titles alone: titles come late, never on a touch screen, and say one point of one line, where a reader
wants all lines at one step. The page's content security policy names this text by its hash and allows no other.
"""

SCRIPT = """
(() => {
  "use strict";
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);

  const show = (event, head, rows) => {
    tip.replaceChildren();
    if (head) tip.append(head);
    for (const [colour, text] of rows) {
      const row = document.createElement("div");
      if (colour) {
        const dot = document.createElement("i");
        dot.className = "dot " + colour;
        row.append(dot);
      }
      row.append(text);
      tip.append(row);
    }
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const right = event.clientX + 14 + box.width < innerWidth;
    tip.style.left = Math.max(4, right ? event.clientX + 14 : event.clientX - 14 - box.width) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4)) + "px";
  };

  const nearest = (values, wanted) => {
    let best = 0;
    values.forEach((value, k) => {
      if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = k;
    });
    return best;
  };

  const lineReader = svg => {
    const lines = [...svg.querySelectorAll("path[data-n]")].map(path => ({
      name: path.dataset.n,
      colour: path.classList[1],
      at: (path.getAttribute("d").match(/-?[0-9.]+(?:e-?[0-9]+)?/g) || []).filter((_, k) => k % 2 === 0).map(Number),
      xs: path.dataset.x.split("|"),
      ys: path.dataset.y.split("|"),
    }));
    if (!lines.length) return null;
    const cursor = document.createElementNS(svg.namespaceURI, "path");
    cursor.setAttribute("class", "cursor");
    svg.append(cursor);
    return (event, x) => {
      const found = lines.map(line => ({ line, k: nearest(line.at, x) }));
      const gap = ({ line, k }) => Math.abs(line.at[k] - x);
      const best = found.reduce((a, b) => (gap(b) < gap(a) ? b : a));
      const place = best.line.at[best.k];
      const rows = found
        .filter(({ line, k }) => Math.abs(line.at[k] - place) < 6)
        .map(({ line, k }) => [line.colour, line.name + ": " + line.ys[k]]);
      cursor.setAttribute("d", "M" + place + " 8V" + (svg.viewBox.baseVal.height - 38));
      show(event, (svg.dataset.below || "") + " " + best.line.xs[best.k], rows);
    };
  };

  const gridReader = svg => {
    if (!svg.dataset.frame) return null;
    const [left, top, width, height] = svg.dataset.frame.split(" ").map(Number);
    const [rows, columns, values] = ["rows", "columns", "values"].map(key => svg.dataset[key].split("|"));
    return (event, x, y) => {
      const column = Math.floor((x - left) / width * columns.length);
      const row = Math.floor((y - top) / height * rows.length);
      if (row < 0 || column < 0 || row >= rows.length || column >= columns.length) tip.hidden = true;
      else {
        const value = values[row * columns.length + column];
        show(event, "", [["", rows[row]], ["", svg.dataset.below + " " + columns[column] + ": " + value]]);
      }
    };
  };

  const markReader = marks => {
    if (!marks.length) return null;
    return (event, x, y) => {
      const gaps = marks.map(mark => Math.hypot(mark.x - x, mark.y - y));
      const best = nearest(gaps, 0);
      if (gaps[best] > 16) tip.hidden = true;
      else show(event, "", [[marks[best].colour, marks[best].text]]);
    };
  };

  for (const svg of document.querySelectorAll("figure svg")) {
    const marks = [];
    for (const title of svg.querySelectorAll("title")) {
      const owner = title.parentNode;
      if (owner.tagName === "circle") {
        const at = ["cx", "cy"].map(name => Number(owner.getAttribute(name)));
        marks.push({ x: at[0], y: at[1], colour: owner.classList[1], text: title.textContent });
      }
      owner.setAttribute("aria-label", title.textContent);
      title.remove();
    }
    const read = gridReader(svg) || lineReader(svg) || markReader(marks);
    if (!read) continue;
    const follow = event => {
      const box = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / box.width;
      read(event, (event.clientX - box.left) * scale, (event.clientY - box.top) * scale);
    };
    const leave = () => {
      tip.hidden = true;
      const cursor = svg.querySelector(".cursor");
      if (cursor) cursor.setAttribute("d", "");
    };
    svg.addEventListener("pointermove", follow);
    svg.addEventListener("pointerdown", follow);
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointercancel", leave);
  }
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
})();
"""
