// What all tabs have: a model that is chosen, and run in a thread of its own.

/**
 * Set a tab up.
 *
 * @param section of the page, with a form to choose a model by, an error and a status
 * @param file of the thread's module
 * @param names of the models that lie beside the page
 * @param asked the model to begin with, or null
 * @param hooks `allow(isReady)` tells what can be pressed, `clear()` that another model is loaded, `failed()` that
 *     something went wrong; `answers` are functions by the type of the thread's message
 * @returns null where there can be no model
 */
export function startTab(section, file, names, asked, { allow, clear, failed = () => {}, answers }) {
  const form = section.querySelector("form");
  const { model, open, folder } = form.elements;
  const [error, status] = [".error", ".status"].map((x) => section.querySelector(x));
  const show = (name, text) => (section.querySelector(`[data-show=${name}]`).textContent = text);
  let isLoaded = false;

  const fail = (message) => {
    error.textContent = `${message[0].toUpperCase()}${message.slice(1)}.`;
    error.hidden = false;
    status.textContent = "";
  };
  const worker = canRun() ? new Worker(new URL(file, import.meta.url), { type: "module" }) : null;
  if (!worker) {
    open.disabled = true;
    fail("this browser has no WebAssembly, which models are run by; use a current Firefox, Chrome, Edge or Safari");
    return null;
  }
  const ask = (message, transferred = []) => {
    error.hidden = true;
    worker.postMessage(message, transferred);
  };
  const load = (name, files) => {
    isLoaded = false;
    allow(false);
    status.textContent = `Loading ${name} …`;
    show("about", "");
    clear();
    ask({ type: "load", name, files });
  };

  worker.onerror = (event) => {
    event.preventDefault();
    fail(`the model's thread stopped (${event.message || "it could not be loaded"}); load the page again`);
    allow(false);
  };
  worker.onmessage = ({ data }) => {
    if (data.type === "failed") {
      failed();
      fail(data.message);
      allow(isLoaded);
      return;
    }
    if (data.type === "loaded") {
      const { attention, parameters } = data.model;
      const kinds = [...new Set([attention].flat())].join(", ");
      show("about", `${kinds} · ${Number(parameters).toLocaleString("en")} parameters · ${data.precision}`);
      isLoaded = true;
    }
    answers[data.type](data);
    if (data.type === "loaded") allow(true);
  };
  model.addEventListener("change", () => load(model.value));
  open.addEventListener("click", () => folder.click());
  folder.addEventListener("change", () => {
    const [first] = folder.files;
    if (!first) return;
    const name = first.webkitRelativePath.split("/")[0] || first.name;
    const files = new Map([...folder.files].map((each) => [each.name, each]));
    model.selectedIndex = -1;
    load(name, files);
    folder.value = "";
  });

  const listed = asked === null || names.includes(asked) ? names : [...names, asked];
  model.append(...listed.map((name) => new Option(name)));
  if (listed.length) {
    model.value = asked ?? listed[0];
    load(model.value);
  } else {
    status.textContent = "No model lies beside this page: open a folder of leap export.";
  }
  return { ask, fail, show, status };
}

/** A number of bytes, for people. */
export function bytes(n) {
  if (n < 1000) return `${n} B`;
  return n < 1e6 ? `${(n / 1e3).toFixed(1)} kB` : `${(n / 1e6).toFixed(2)} MB`;
}

function canRun() {
  return typeof WebAssembly === "object" && typeof Worker === "function";
}
