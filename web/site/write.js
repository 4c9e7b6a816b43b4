// The tab Write: a prompt goes on, token by token.

import { Chart } from "./chart.js";
import { bytes, startTab } from "./tab.js";

const WINDOW = 1000; // Milliseconds over which speed is measured.
const BYTES = 4; // Of a number in float32, as a KV cache would hold it.

/** Set the tab up: choose a model, and do as the form says. */
export function startWrite(section, names, asked) {
  const form = section.querySelector("form");
  const { model, open, prompt, write, more, stop } = form.elements;
  const [given, written, box] = [".given", ".new", ".text"].map((x) => section.querySelector(x));
  const charts = Object.fromEntries(
    [...section.querySelectorAll("[data-chart]")].map((svg) => [svg.dataset.chart, new Chart(svg)]),
  );
  const show = (name, text) => (section.querySelector(`[data-show=${name}]`).textContent = text);
  let cachePerToken = null;
  let meter = null;
  let begun = false;

  /** What can be pressed: nothing of a model while it is loaded or missing, only stop while it writes. */
  const allow = (ready, writing = false) => {
    write.disabled = !ready;
    more.disabled = !ready || !begun;
    stop.disabled = !writing;
    model.disabled = writing || !model.options.length;
    open.disabled = writing;
    box.ariaBusy = String(writing);
  };
  const clear = () => {
    given.textContent = written.textContent = "";
    for (const chart of Object.values(charts)) chart.clear();
    for (const name of ["speed", "state", "tokens"]) show(name, "–");
    show("cache", "");
  };

  const answers = {
    loaded({ model: { hidden_size: size, n_layer: layers }, stateBytes }) {
      cachePerToken = Number.isInteger(size) && Number.isInteger(layers) ? 2 * size * layers * BYTES : null;
      show("state", bytes(stateBytes));
      tab.status.textContent = "Ready.";
      begun = false;
    },

    wrote({ piece, n, nRead, stateBytes }) {
      const below = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
      written.append(piece);
      if (below) box.scrollTop = box.scrollHeight;
      const speed = measured(n);
      show("tokens", nRead.toLocaleString("en"));
      show("state", bytes(stateBytes));
      if (speed) {
        show("speed", Math.round(speed).toLocaleString("en"));
        charts.speed.add(nRead, speed);
      }
      if (cachePerToken) {
        charts.state.add(nRead, stateBytes, nRead * cachePerToken);
        show("cache", `- - a KV cache of softmax attention: ${bytes(nRead * cachePerToken)}`);
      } else {
        charts.state.add(nRead, stateBytes);
      }
    },

    done({ ended }) {
      written.normalize();
      tab.status.textContent = ended ? `The text ends here, after ${tokens(meter.n)}.` : `Wrote ${tokens(meter.n)}.`;
      allow(true);
    },
  };
  const tab = startTab(section, "worker.js", names, asked, { allow, clear, answers });
  if (!tab) return;

  const begin = (message) => {
    begun = true;
    meter = { marks: [], n: 0 };
    allow(false, true);
    tab.status.textContent = "Writing …";
    tab.ask({ ...message, tokens: form.elements.tokens.valueAsNumber });
  };

  /** Tokens per second of late, with some more of them. */
  function measured(n) {
    const now = performance.now();
    meter.n += n;
    meter.marks.push([now, meter.n]);
    while (meter.marks.length > 2 && now - meter.marks[0][0] > WINDOW) meter.marks.shift();
    const [[from, before]] = meter.marks;
    return now > from ? (1000 * (meter.n - before)) / (now - from) : null;
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (write.disabled) return;
    clear();
    given.textContent = prompt.value;
    const { temperature, seed } = form.elements;
    begin({ type: "write", prompt: prompt.value, temperature: temperature.valueAsNumber, seed: seed.valueAsNumber });
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  more.addEventListener("click", () => form.reportValidity() && begin({ type: "more" }));
  stop.addEventListener("click", () => tab.ask({ type: "stop" }));
}

function tokens(n) {
  return n === 1 ? "1 token" : `${n.toLocaleString("en")} tokens`;
}
