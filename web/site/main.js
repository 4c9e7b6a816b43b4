// The page: one module per tab, each begun when it is first looked at.

import { startInterpret } from "./interpret.js";
import { startWrite } from "./write.js";

const tabs = {
  write: { start: startWrite, tasks: ["lm"] },
  interpret: { start: startInterpret, tasks: ["text", "speech"] },
};
const begun = new Set();
const models = await listModels();
const asked = new URLSearchParams(location.search).get("model");
const tabOf = (model) => Object.keys(tabs).find((name) => tabs[name].tasks.includes(model?.task));
const first = tabOf(models.find((model) => model.name === asked)) ?? tabOf(models[0]) ?? "write";

/** Show the tab that the address names. */
function look() {
  const chosen = location.hash.slice(1) in tabs ? location.hash.slice(1) : first;
  for (const name of Object.keys(tabs)) {
    document.getElementById(name).hidden = name !== chosen;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === chosen) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (begun.has(chosen)) return;
  begun.add(chosen);
  const names = models.filter((model) => tabOf(model) === chosen).map((model) => model.name);
  const isOurs = names.includes(asked) || !models.some((model) => model.name === asked);
  tabs[chosen].start(document.getElementById(chosen), names, isOurs ? asked : null);
}

/** The models that lie beside the page: name and task. */
async function listModels() {
  try {
    return await (await fetch("models/index.json")).json();
  } catch {
    return [];
  }
}

addEventListener("hashchange", look);
look();

if (navigator.serviceWorker) {
  navigator.serviceWorker.register("service-worker.js").catch(() => {}); // Then it works online only.
  navigator.serviceWorker.ready.then(() => {
    document.querySelector("[data-show=offline]").textContent = "The page works offline now.";
  });
}
