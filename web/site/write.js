// The tab Write: a prompt goes on, token by token.

import { Chart } from "./chart.js";

const WINDOW = 1000; // Milliseconds over which speed is measured.
const BYTES = 4; // Of a number in float32, as a KV cache would hold it.

/** Set the tab up: choose a model, and do as the form says. */
export function startWrite(section) {
  const form = section.querySelector("form");
  const { model, open, folder, prompt, write, more, stop } = form.elements;
  const [error, status, given, written] = [".error", ".status", ".given", ".new"].map((x) => section.querySelector(x));
  const box = section.querySelector(".text");
  const show = (name, text) => (section.querySelector(`[data-show=${name}]`).textContent = text);
  const charts = Object.fromEntries(
    [...section.querySelectorAll("[data-chart]")].map((svg) => [svg.dataset.chart, new Chart(svg)]),
  );
  let cachePerToken = null;
  let meter = null;
  let loaded = false;
  let begun = false;

  const fail = (message) => {
    error.textContent = message;
    error.hidden = false;
    status.textContent = "";
  };
  /** What can be pressed: nothing of a model while it is loaded or missing, only stop while it writes. */
  const allow = (ready, writing = false) => {
    write.disabled = !ready;
    more.disabled = !ready || !begun;
    stop.disabled = !writing;
    model.disabled = writing || !model.options.length;
    open.disabled = writing;
    box.ariaBusy = String(writing);
  };

  if (typeof WebAssembly !== "object" || typeof Worker !== "function") {
    open.disabled = true;
    fail("This browser has no WebAssembly, which models are run by; use a current Firefox, Chrome, Edge or Safari.");
    return;
  }

  const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  worker.onerror = (event) => {
    event.preventDefault();
    fail(`The model's thread stopped (${event.message || "it could not be loaded"}); load the page again.`);
    allow(false);
  };
  const ask = (message) => {
    error.hidden = true;
    worker.postMessage(message);
  };
  const load = (name, files) => {
    loaded = begun = false;
    allow(false);
    status.textContent = `Loading ${name} …`;
    show("about", "");
    clear();
    ask({ type: "load", name, files });
  };
  const clear = () => {
    given.textContent = written.textContent = "";
    for (const chart of Object.values(charts)) chart.clear();
    for (const name of ["speed", "state", "tokens"]) show(name, "–");
    show("cache", "");
  };
  const begin = (message) => {
    begun = true;
    meter = { marks: [], n: 0 };
    allow(false, true);
    status.textContent = "Writing …";
    ask({ ...message, tokens: form.elements.tokens.valueAsNumber });
  };

  const answers = {
    loaded({ model: about, precision, stateBytes }) {
      const { attention, parameters, hidden_size: size, n_layer: layers } = about;
      cachePerToken = Number.isInteger(size) && Number.isInteger(layers) ? 2 * size * layers * BYTES : null;
      const kinds = [...new Set([attention].flat())].join(", ");
      show("about", `${kinds} · ${Number(parameters).toLocaleString("en")} parameters · ${precision}`);
      show("state", bytes(stateBytes));
      status.textContent = "Ready.";
      loaded = true;
      allow(true);
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
      status.textContent = ended ? `The text ends here, after ${tokens(meter.n)}.` : `Wrote ${tokens(meter.n)}.`;
      allow(true);
    },

    failed({ message }) {
      fail(`${message[0].toUpperCase()}${message.slice(1)}.`);
      allow(loaded);
    },
  };
  worker.onmessage = ({ data }) => answers[data.type](data);

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
  stop.addEventListener("click", () => worker.postMessage({ type: "stop" }));
  model.addEventListener("change", () => load(model.value));
  open.addEventListener("click", () => folder.click());
  folder.addEventListener("change", () => {
    const [first] = folder.files;
    if (!first) return;
    const name = first.webkitRelativePath.split("/")[0] || first.name;
    const files = new Map([...folder.files].map((file) => [file.name, file]));
    model.selectedIndex = -1;
    load(name, files);
    folder.value = "";
  });

  listModels().then((names) => {
    const asked = new URLSearchParams(location.search).get("model");
    if (asked !== null && !names.includes(asked)) names.push(asked);
    model.append(...names.map((name) => new Option(name)));
    if (!names.length) {
      status.textContent = "No model lies beside this page: open a folder of leap export.";
      return;
    }
    model.value = asked ?? names[0];
    load(model.value);
  });
}

/** Names of the models that lie beside the page. */
async function listModels() {
  try {
    return await (await fetch("models/index.json")).json();
  } catch {
    return [];
  }
}

function tokens(n) {
  return n === 1 ? "1 token" : `${n.toLocaleString("en")} tokens`;
}

function bytes(n) {
  if (n < 1000) return `${n} B`;
  return n < 1e6 ? `${(n / 1e3).toFixed(1)} kB` : `${(n / 1e6).toFixed(2)} MB`;
}
