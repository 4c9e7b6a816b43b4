// A small chart of lines that grow to the right, all on one scale that begins at 0.

const MOST = 400; // Points of a line; then every second one is left out.

export class Chart {
  constructor(svg) {
    this.svg = svg;
    svg.setAttribute("viewBox", "0 0 100 100");
    svg.setAttribute("preserveAspectRatio", "none");
    this.clear();
  }

  clear() {
    this.points = [];
    this.svg.replaceChildren();
  }

  /** Add a point to each line: where it is, and how high. */
  add(x, ...heights) {
    this.points.push([x, ...heights]);
    if (this.points.length > MOST) this.points = this.points.filter((_, i) => i % 2 === 0);
    const [first, last] = [this.points[0][0], this.points.at(-1)[0]];
    const top = Math.max(1e-9, ...this.points.flatMap(([, ...ys]) => ys)) * 1.1;
    while (this.svg.childElementCount < heights.length) {
      this.svg.append(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
    }
    heights.forEach((_, line) => {
      const places = this.points.map((point) => {
        const x = (100 * (point[0] - first)) / Math.max(1, last - first);
        return `${x.toFixed(2)},${(100 - (100 * point[line + 1]) / top).toFixed(2)}`;
      });
      this.svg.children[line].setAttribute("points", places.join(" "));
    });
  }
}
