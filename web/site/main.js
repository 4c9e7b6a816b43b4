// The page: one module per tab.

import { startWrite } from "./write.js";

startWrite(document.querySelector("#write"));

if (navigator.serviceWorker) {
  navigator.serviceWorker.register("service-worker.js").catch(() => {}); // Then it works online only.
  navigator.serviceWorker.ready.then(() => {
    document.querySelector("[data-show=offline]").textContent = "The page works offline now.";
  });
}
