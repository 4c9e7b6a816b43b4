// A graph of an exported model, run by onnxruntime in WebAssembly.

import * as ort from "./vendor/ort.mjs";
import { LeapError, firstLine } from "./errors.js";
import { AGAIN, NEXT } from "./manifest.js";

ort.env.logLevel = "fatal"; // What goes wrong is thrown as well.
ort.env.wasm.numThreads = 1; // The fastest for small models; more would ask for headers of the server.
ort.env.wasm.wasmPaths = { wasm: new URL("vendor/ort.wasm", import.meta.url).href };

const ARRAYS = { float32: Float32Array, float64: Float64Array, int64: BigInt64Array, bool: Uint8Array };

/** One graph with its state: tensors by name. */
export class Graph {
  /** Load a graph that the manifest tells of. */
  static async load(folder, manifest, name) {
    const told = manifest.graphs[name];
    if (!told) throw new LeapError(`${folder.name} has no graph called ${name}; ${AGAIN}`);
    const path = `${folder.name}/${told.file}`;
    const bytes = await folder.read(told.file);
    if (bytes === null) throw new LeapError(`${path} is missing; ${AGAIN}`);
    const session = await startSession(bytes, path);
    if (!same(session.inputNames, told.inputs) || !same(session.outputNames, told.outputs)) {
      throw new LeapError(`${path} is not the graph that its manifest tells of; ${AGAIN}`);
    }
    return new Graph(session, manifest.states, path);
  }

  constructor(session, states, path) {
    this.session = session;
    const given = new Map(session.inputMetadata.map((each) => [each.name, each]));
    this.reads = states.filter((each) => given.has(each.name));
    for (const each of this.reads) {
      const found = given.get(each.name);
      if (!fits(each, found)) {
        throw new LeapError(
          `${path} takes ${each.name} as ${found.type} [${found.shape}], and its manifest tells of ` +
            `${each.type} [${each.shape}]; ${AGAIN}`,
        );
      }
    }
    this.writes = session.outputNames.filter((each) => each.startsWith(NEXT)).map((each) => each.slice(NEXT.length));
    const known = new Set(states.map((each) => each.name));
    if (this.writes.some((each) => !known.has(each))) {
      throw new LeapError(`${path} gives a state that its manifest does not tell of; ${AGAIN}`);
    }
  }

  /** What comes out by name, and the state after. */
  async run(states, inputs) {
    const given = { ...inputs };
    for (const { name } of this.reads) given[name] = states[name];
    const found = await this.session.run(given);
    const after = { ...states };
    for (const name of this.writes) after[name] = found[NEXT + name];
    return [found, after];
  }

  /** Free the memory of the graph. */
  release() {
    return this.session.release();
  }
}

/** The state of one text before its first token. */
export function emptyState(states) {
  const sizes = { batch: 1, tokens: 0 };
  return Object.fromEntries(
    states.map(({ name, type, shape, fill }) => {
      const dims = shape.map((x) => sizes[x] ?? x);
      const data = new ARRAYS[type](dims.reduce((a, b) => a * b, 1));
      return [name, new ort.Tensor(type, data.fill(type === "int64" ? BigInt(fill) : fill), dims)];
    }),
  );
}

/** Memory that a state takes. */
export function stateBytes(states) {
  return Object.values(states).reduce((sum, x) => sum + x.data.byteLength, 0);
}

/** Whole numbers as a graph takes them. */
export function integers(numbers, dims) {
  return new ort.Tensor("int64", BigInt64Array.from(numbers, BigInt), dims);
}

/** Numbers with a fraction as a graph takes them. */
export function numbers(values, dims) {
  return new ort.Tensor("float32", Float32Array.from(values), dims);
}

async function startSession(bytes, path) {
  try {
    return await ort.InferenceSession.create(new Uint8Array(bytes), { executionProviders: ["wasm"], logSeverityLevel: 3 });
  } catch (error) {
    const line = firstLine(error);
    if (/no available backend/.test(line)) {
      throw new LeapError(`this browser cannot run models (${line}); use a current one`);
    }
    throw new LeapError(`${path} is no graph that can be run (${line}); ${AGAIN}`);
  }
}

function same(a, b) {
  return a.length === b.length && a.every((each, i) => each === b[i]);
}

function fits(wanted, found) {
  if (found.type !== wanted.type || found.shape.length !== wanted.shape.length) return false;
  return wanted.shape.every((x, i) => typeof x === "string" || typeof found.shape[i] === "string" || x === found.shape[i]);
}
