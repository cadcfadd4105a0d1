"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  // A page opened from a file may be refused storage: the choice then lasts until it is closed.
  const remember = (value) => { try { localStorage.setItem("mpc-dist-theme", value); } catch { /* not kept */ } };
  try {
    const kept = localStorage.getItem("mpc-dist-theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch { /* none kept */ }
  name();
  system.addEventListener("change", name);
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
    name();
  });

  for (const copy of document.querySelectorAll(".copy")) {
    copy.addEventListener("click", async () => {
      const code = copy.parentElement.querySelector("code");
      let done = true;
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch {
        const range = document.createRange();
        range.selectNodeContents(code);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        done = document.execCommand("copy");
      }
      copy.textContent = done ? "Copied" : "Selected";
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    });
  }

  const pointer = document.getElementById("pointer");
  const row = (style, left, right) => {
    const line = document.createElement("div");
    if (style) line.className = style;
    for (const text of [left, right]) {
      const span = document.createElement("span");
      span.textContent = text;
      line.append(span);
    }
    return line;
  };
  for (const chart of document.querySelectorAll("svg[data-hover]")) {
    const data = JSON.parse(chart.dataset.hover);
    const crosshair = document.createElementNS(chart.namespaceURI, "line");
    crosshair.setAttribute("class", "crosshair");
    crosshair.setAttribute("y1", data.top);
    crosshair.setAttribute("y2", data.bottom);
    const hide = () => { pointer.hidden = true; crosshair.remove(); };
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect();
      const x = (event.clientX - box.left) * chart.viewBox.baseVal.width / box.width;
      const near = (points) => points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
      const found = data.series.filter((one) => one.points.length).map((one) => [one, near(one.points)]);
      if (!found.length || x < data.left - 10 || x > data.right + 10) return hide();
      const place = near(found.map(([, point]) => point))[0];
      // Only what was measured here: a series whose nearest point is elsewhere says nothing about this place.
      const here = found.filter(([, point]) => Math.abs(point[0] - place) < 4);
      crosshair.setAttribute("x1", place);
      crosshair.setAttribute("x2", place);
      chart.append(crosshair);
      pointer.replaceChildren(...here.map(([one, point]) => row(one.style, `${one.name}, ${point[2]}`, point[3])));
      pointer.hidden = false;
      const left = Math.min(event.clientX + 14, innerWidth - pointer.offsetWidth - 8);
      pointer.style.left = `${Math.max(8, left)}px`;
      pointer.style.top = `${Math.max(8, Math.min(event.clientY + 14, innerHeight - pointer.offsetHeight - 8))}px`;
    });
  }
})();
