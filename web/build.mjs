// Puts the page together: node web/build.mjs OUTPUT [FOLDER OF leap export ...]

import { createHash } from "node:crypto";
import { cpSync, existsSync, mkdirSync, readFileSync, readdirSync, rmSync, statSync, writeFileSync } from "node:fs";
import { basename, dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const HERE = dirname(fileURLToPath(import.meta.url));
const VENDOR = {
  "ort.mjs": "onnxruntime-web/dist/ort.wasm.bundle.min.mjs",
  "ort.wasm": "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm",
  "tokenizers.mjs": "@huggingface/tokenizers/dist/tokenizers.min.mjs",
  "tokenizers.LICENSE": "@huggingface/tokenizers/LICENSE",
  "sentencex.mjs": "sentencex-wasm/sentencex_wasm.js",
  "sentencex.wasm": "sentencex-wasm/sentencex_wasm_bg.wasm",
  "sentencex.LICENSE": "sentencex-wasm/LICENSE",
};
const WORKER = "service-worker.js";

const [output, ...models] = process.argv.slice(2);
const names = models.map((folder) => basename(resolve(folder)));
const tasks = models.map((folder) => {
  if (!existsSync(join(folder, "manifest.json"))) refuse(`no exported model at ${folder}; make one with leap export`);
  try {
    const { runtime = "onnxruntime", task } = JSON.parse(readFileSync(join(folder, "manifest.json"), "utf-8"));
    if (runtime !== "onnxruntime") refuse(`${folder} was exported for ${runtime}; export it without --to`);
    return task;
  } catch (error) {
    return refuse(`${folder}/manifest.json is not a whole JSON file (${error.message}); make it again with leap export`);
  }
});
const twice = names.find((name, i) => names.indexOf(name) !== i);
if (twice) refuse(`two models are called ${twice}; rename the folder of one`);
if (existsSync(output) && readdirSync(output).length && !existsSync(join(output, WORKER))) {
  refuse(`${output} holds something else; give a folder that is new, empty or of an earlier build`);
}

rmSync(output, { recursive: true, force: true });
cpSync(join(HERE, "site"), output, { recursive: true });
for (const [name, path] of Object.entries(VENDOR)) {
  mkdirSync(join(output, "vendor"), { recursive: true });
  cpSync(join(HERE, "node_modules", path), join(output, "vendor", name));
}
mkdirSync(join(output, "models"));
models.forEach((folder, i) => cpSync(folder, join(output, "models", names[i]), { recursive: true }));
writeFileSync(join(output, "models", "index.json"), JSON.stringify(names.map((name, i) => ({ name, task: tasks[i] }))));

const files = readdirSync(output, { recursive: true })
  .map((path) => path.replaceAll("\\", "/"))
  .filter((path) => path !== WORKER && statSync(join(output, path)).isFile())
  .sort();
const hash = createHash("sha256");
for (const path of files) hash.update(path).update(readFileSync(join(output, path)));
const build = { version: hash.digest("hex").slice(0, 16), files: ["./", ...files.map(encodeURI)] };
const worker = join(output, WORKER);
writeFileSync(worker, readFileSync(worker, "utf-8").replace("BUILD", JSON.stringify(build)));

function refuse(message) {
  console.error(`make web: ${message}`);
  process.exit(1);
}
