// The tab Interpret: what is typed, spoken or dropped is translated as it comes, word by word.

import { Chart } from "./chart.js";
import { LeapError, firstLine } from "./errors.js";
import { decode, listen, play } from "./microphone.js";
import { bytes, startTab } from "./tab.js";
import { splitWords } from "./words.js";

const SEGMENT = 320; // Milliseconds of sound that come at once.

/** Set the tab up: choose a model, and translate what is given to it. */
export function startInterpret(section, names, asked) {
  const form = section.querySelector("form");
  const { model, open, policy, source, rest, clear: anew, speak, choose, sound, stop, paced } = form.elements;
  const [box, level] = [".text", "meter"].map((x) => section.querySelector(x));
  const [typing, hearing] = ["typing", "hearing"].map((x) => section.querySelector(`[data-for=${x}]`));
  const chart = new Chart(section.querySelector("[data-chart=lag]"));
  const show = (name, text) => (section.querySelector(`[data-show=${name}]`).textContent = text);
  let task = null;
  let rate = null;
  let id = 0; // Of the source that is translated now.
  let taken = ""; // What of the typed text was given to the model.
  let line = null; // The line of the translation that is being written.
  let lags = [];
  let laggings = [];
  let isBroken = false; // Whether the model could not go on.
  let end = null; // While there is sound: what ends it.

  const allow = (ready) => {
    const busy = end !== null;
    model.disabled = busy || !model.options.length;
    open.disabled = busy;
    policy.disabled = source.disabled = rest.disabled = anew.disabled = !ready || busy;
    speak.disabled = choose.disabled = paced.disabled = !ready || busy;
    stop.disabled = !busy;
    box.ariaBusy = String(busy);
    level.hidden = !busy;
  };
  const clear = () => {
    box.replaceChildren();
    chart.clear();
    [taken, line, lags, laggings] = ["", null, [], []];
    for (const name of ["lag", "words", "state"]) show(name, "–");
    show("lagging", "");
  };
  /** Begin with another source. */
  const begin = () => {
    clear();
    isBroken = false;
    tab.ask({ type: "begin", id: ++id, policy: policy.value });
  };
  const unit = () => (task === "speech" ? "ms" : "words");

  const answers = {
    loaded({ task: found, rate: wanted, language }) {
      [task, rate] = [found, wanted];
      typing.hidden = task !== "text";
      hearing.hidden = task !== "speech";
      source.lang = language ?? "";
      tab.status.textContent = task === "text" ? "Ready: type or paste a text." : "Ready: speak, or give a sound file.";
      begin();
      if (task === "text") read();
    },

    wrote({ id: of, words, stateBytes }) {
      if (of !== id) return;
      show("state", bytes(stateBytes));
      if (!words.length) return;
      const below = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
      if (!line) box.append((line = document.createElement("p")));
      for (const { word, lag } of words) {
        const span = document.createElement("span");
        span.textContent = word;
        span.className = "word";
        span.dataset.lag = `${lag < 0 ? "" : "+"}${lag.toFixed(0)}`;
        span.title = `${lag.toFixed(0)} ${unit()} behind`;
        line.append(...(line.childElementCount ? [" "] : []), span);
        lags.push(lag);
        chart.add(lags.length, Math.max(0, lag));
      }
      if (below) box.scrollTop = box.scrollHeight;
      show("words", lags.length.toLocaleString("en"));
      show("lag", `${amount(mean(lags))} ${unit()}`);
    },

    heard({ id: of, seconds }) {
      if (of === id && end) tab.status.textContent = `Heard ${seconds.toFixed(1)} s …`;
    },

    ended({ id: of, length, lagging }) {
      if (of !== id) return;
      line = null;
      if (lagging !== null) laggings.push(lagging);
      if (laggings.length) show("lagging", `LAAL ${amount(mean(laggings))} ${unit()}`);
      if (task === "speech") tab.status.textContent = `Heard ${(length / 1000).toFixed(1)} s to the end.`;
    },
  };
  const failed = () => {
    if (end) end(false);
    isBroken = true;
  };
  const tab = startTab(section, "interpret-worker.js", names, asked, { allow, clear, failed, answers });
  if (!tab) return;

  /** Give the model what was typed since: whole words, and ends of lines. */
  function read() {
    if (isBroken || !source.value.startsWith(taken)) begin(); // Also if what was read has been changed.
    const more = source.value.slice(taken.length);
    const whole = more.slice(0, more.search(/\s\S*$/) + 1);
    taken += whole;
    whole.split("\n").forEach((text, i, lines) => {
      const words = splitWords(text);
      if (words.length) tab.ask({ type: "words", words });
      if (i < lines.length - 1) tab.ask({ type: "line" });
    });
  }

  /** Hear samples, of which the last has come at a time. */
  function hear(samples, arrived) {
    const power = samples.reduce((sum, x) => sum + x * x, 0) / samples.length;
    level.value = Math.max(0, 1 + Math.log10(power + 1e-12) / 6); // From -60 dB to 0.
    tab.ask({ type: "sound", samples, arrived });
  }

  /** Begin with sound; `halt` is called when it is to end, and gives what is left of it. */
  function beginSound(halt) {
    begin();
    end = (isWhole = true) => {
      end = null;
      const left = halt();
      if (isWhole) {
        if (left?.length) hear(left, performance.now());
        tab.ask({ type: "finish" });
      }
      allow(true);
    };
    allow(true);
  }

  async function listenNow() {
    speak.disabled = true;
    const halt = await listen(rate, SEGMENT, (samples) => hear(samples, performance.now()));
    beginSound(halt);
    tab.status.textContent = "Listening …";
  }

  async function hearFile(file) {
    const { sound: found, samples } = await decode(file, rate);
    let isStopped = false;
    const silence = paced.checked ? play(found) : () => {};
    beginSound(() => {
      isStopped = true;
      silence();
    });
    tab.status.textContent = `Hearing ${file.name} …`;
    const size = Math.ceil((SEGMENT * rate) / 1000);
    const started = performance.now();
    for (let start = 0; start < samples.length; start += size) {
      const part = samples.slice(start, start + size);
      const arrived = started + (1000 * (start + part.length)) / rate;
      if (paced.checked) await new Promise((resolve) => setTimeout(resolve, arrived - performance.now()));
      if (isStopped) return;
      hear(part, arrived);
    }
    end();
  }

  /** Do what may go wrong in a way that whoever uses the page can put right. */
  async function attempt(action) {
    try {
      await action();
    } catch (error) {
      tab.fail(error instanceof LeapError ? error.message : `this did not work (${firstLine(error)}); load the page again`);
      allow(true);
    }
  }

  source.addEventListener("input", read);
  rest.addEventListener("click", () => {
    if (!source.value.endsWith("\n")) source.value += "\n";
    read();
    source.focus();
  });
  anew.addEventListener("click", () => {
    source.value = "";
    begin();
    source.focus();
  });
  policy.addEventListener("change", () => {
    begin();
    if (task === "text") read();
  });
  speak.addEventListener("click", () => attempt(listenNow));
  stop.addEventListener("click", () => end());
  choose.addEventListener("click", () => sound.click());
  sound.addEventListener("change", () => {
    const [file] = sound.files;
    if (file) attempt(() => hearFile(file));
    sound.value = "";
  });
  section.addEventListener("dragover", (event) => event.preventDefault());
  section.addEventListener("drop", (event) => {
    event.preventDefault();
    const [file] = event.dataTransfer.files;
    if (!file) return;
    if (task !== "speech") tab.fail(`${file.name} cannot be heard: the model translates text; choose one of speech`);
    else if (choose.disabled) tab.fail(`${file.name} came while another sound is heard; stop that first`);
    else attempt(() => hearFile(file));
  });
  form.addEventListener("submit", (event) => event.preventDefault());
}

function mean(values) {
  return values.reduce((a, b) => a + b, 0) / values.length;
}

/** A number with one digit after the point, if it is small. */
function amount(n) {
  return n < 100 ? n.toFixed(1) : n.toFixed(0);
}
