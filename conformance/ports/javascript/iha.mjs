// Interleaved Head Attention (IHA) 1.2 in JavaScript, written from SPEC.md alone, to be read and to be copied from.
//
//     node iha.mjs IN_DIR OUT_DIR                                           runs it on a folder of inputs (chapter 8.1)
//     iha run --exec "node conformance/ports/javascript/iha.mjs"            judges it
//
// One file, no dependencies, Node 20 or later. Ids in brackets are requirements of SPEC.md, numbers in parentheses its
// equations, and letters those of its chapter 1. JavaScript's numbers are float64, so every dtype is widened to float64
// when it is read, all stages are computed in float64, and `output` is rounded to the storage dtype once, at the end;
// [NUM-1] to [NUM-3] allow that. Speed is not a goal: every loop is written as its equation reads.
//
// Exit status: 0 done, 1 a file that cannot be read or written (the others are done), 2 wrong usage.
//
// An array is { dtype, shape, data } with `data` flat and row-major: a Float64Array for the four floating-point dtypes,
// a BigInt64Array for I64, a Uint8Array for BOOL.

import { readFileSync, readdirSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";

class InputError extends Error {} //   [ERR-1] the input is wrong
class Refusal extends Error {} //      [ERR-2] the input is right, but this port cannot do it

// Of a single size. [IDX-2] Token indices differ by less than 2^32, W counts up to 2^33: float64 holds their products.
const MAX_SIZE = 2 ** 20;
const MAX_ELEMENTS = 2 ** 26; // of one array
const MAX_FILE = 2 ** 28; // bytes

const size = (shape) => shape.reduce((a, b) => a * b, 1);

function zeros(...shape) {
  if (size(shape) > MAX_ELEMENTS) throw new Refusal(`shape (${shape.join(", ")}) is more than this port allocates`);
  return { dtype: "F64", shape, data: new Float64Array(size(shape)) };
}

/** Where element [i, j], [i, j, k] or [i, j, k, l] of an array is in its data. */
const at2 = ({ shape }, i, j) => i * shape[1] + j;
const at3 = ({ shape }, i, j, k) => (i * shape[1] + j) * shape[2] + k;
const at4 = ({ shape }, i, j, k, l) => ((i * shape[1] + j) * shape[2] + k) * shape[3] + l;

// ---- Chapters 2 and 5: arguments and configuration ------------------------------------------------------------------

const FLOATS = { float64: "F64", float32: "F32", float16: "F16", bfloat16: "BF16" };
const ARRAYS = ["q", "k", "v", "alpha_q", "alpha_k", "alpha_v", "collapse"];
const INTEGER_ARRAYS = ["segment_ids", "kv_segment_ids", "positions", "kv_positions"];
const ALL_ARRAYS = [...ARRAYS, "key_mask", ...INTEGER_ARRAYS];

const oneOf = (...texts) => [texts.map((text) => `"${text}"`).join(" or "), (x) => texts.includes(x)];
const isPositive = (x) => Number.isFinite(x) && x > 0;
// [IDX-2] W has no upper limit. JSON.parse makes Infinity of one that is beyond float64, which hides the same keys.
const isWindow = (x) => x >= 1 && (Number.isInteger(x) || x === Infinity);

/** [CFG-1] Every field of the configuration, with what it may be, in words and as a test. */
const FIELDS = {
  causal: oneOf("virtual", "token", "none"),
  window: ["null or a whole number >= 1", (x) => x === null || isWindow(x)],
  window_unit: oneOf("virtual", "token"),
  rope: oneOf("virtual", "token", "none"),
  rope_theta: ["a finite number > 0", isPositive],
  rope_pairing: oneOf("half", "adjacent"),
  scale: ["null or a finite number > 0", (x) => x === null || isPositive(x)],
  normalisation: oneOf("softmax", "none"),
};

/** A value of JSON for a message. */
function show(x) {
  if (typeof x === "object" && x !== null) return Array.isArray(x) ? `a list of ${x.length}` : "an object";
  return `${JSON.stringify(x)}`;
}

/** [ERR-1] names what is wrong, what was expected and what was found. */
function expect(right, what, expected, found) {
  if (!right) throw new InputError(`${what}: expected ${expected}, got ${found}`);
}

const isObject = (x) => typeof x === "object" && x !== null && !Array.isArray(x);

/** That `object` has all these keys, and, or else it throws `Unknown`, no others. */
function expectKeys(object, what, keys, Unknown) {
  expect(isObject(object), what, "an object", show(object));
  for (const key of Object.keys(object))
    if (!keys.includes(key)) throw new Unknown(`${what}: \`${key}\` is not known to this port`);
  for (const key of keys) expect(Object.hasOwn(object, key), `\`${key}\` of ${what}`, "a value", "none");
}

function expectDtype(args, name, ...dtypes) {
  expect(dtypes.includes(args[name].dtype), `\`${name}\` dtype`, dtypes.join(" or "), args[name].dtype);
}

/** [DIM-1] That the shape of an array is one of `choices`, each written in letters, such as "BNHd". */
function expectShape(args, name, sizes, ...choices) {
  const { shape } = args[name];
  const fits = (letters) => [...letters].map((letter) => sizes[letter]).join() === shape.join();
  const withSize = (letter) => (sizes[letter] === undefined ? letter : `${letter}=${sizes[letter]}`);
  const write = (letters) => `(${[...letters].map(withSize).join(", ")})`;
  expect(choices.some(fits), `\`${name}\` shape`, choices.map(write).join(" or "), `(${shape.join(", ")})`);
}

function checkConfig(config) {
  expectKeys(config, "config", Object.keys(FIELDS), Refusal);
  for (const [field, [expected, isRight]] of Object.entries(FIELDS))
    expect(isRight(config[field]), `\`${field}\``, expected, show(config[field]));
}

/** [DIM-1], [DIM-2], [TYP-1] to [TYP-3], [ARG-3], [ARG-4], [ROPE-6]: checks the arrays, and returns the sizes. */
function checkArrays(args, { rope }) {
  for (const name of ARRAYS) expect(args[name], `\`${name}\``, "an array", "none");

  expectDtype(args, "q", ...Object.values(FLOATS));
  const storage = args.q.dtype;
  const parameter = storage === "F16" || storage === "BF16" ? [storage, "F32"] : [storage];
  for (const name of ["k", "v"]) expectDtype(args, name, storage);
  expectDtype(args, "alpha_q", ...parameter);
  for (const name of ["alpha_k", "alpha_v", "collapse"]) expectDtype(args, name, args.alpha_q.dtype);
  if (args.key_mask) expectDtype(args, "key_mask", "BOOL");
  for (const name of INTEGER_ARRAYS) if (args[name]) expectDtype(args, name, "I64");

  const [B, N, H, d] = args.q.shape;
  const [, M, G] = args.k.shape;
  const e = args.v.shape[3];
  const P = args.alpha_q.shape[2];
  const sizes = { B, N, M, H, G, P, d, e };
  for (const [name, axes] of [["q", 4], ["k", 4], ["v", 4], ["alpha_q", 3]])
    expect(args[name].shape.length === axes, `\`${name}\` shape`, `${axes} axes`, `(${args[name].shape.join(", ")})`);
  expectShape(args, "k", sizes, "BMGd");
  expectShape(args, "v", sizes, "BMGe");
  expectShape(args, "alpha_q", sizes, "HHP");
  expectShape(args, "alpha_k", sizes, "GHP");
  expectShape(args, "alpha_v", sizes, "GHP");
  expectShape(args, "collapse", sizes, "HHP", "HP");
  for (const letter of "HGPde") expect(sizes[letter] >= 1, letter, "at least 1", sizes[letter]);
  expect(rope === "none" || d % 2 === 0, "`q` head width", "an even d with RoPE", d);

  if (args.key_mask) expectShape(args, "key_mask", sizes, "BM");
  for (const [name, kvName] of [["segment_ids", "kv_segment_ids"], ["positions", "kv_positions"]]) {
    if (args[name]) expectShape(args, name, sizes, "BN");
    if (args[kvName]) expectShape(args, kvName, sizes, "BM");
    expect(args[name] || !args[kvName], `\`${name}\``, `an array beside \`${kvName}\``, "none");
    expect(!args[name] || args[kvName] || N === M, `\`${kvName}\``, `an array, as N=${N} and M=${M} differ`, "none");
  }
  for (const letter of Object.keys(sizes))
    if (sizes[letter] > MAX_SIZE) throw new Refusal(`${letter} = ${sizes[letter]}: this port goes up to ${MAX_SIZE}`);
  return sizes;
}

/** [ARG-1], [ARG-2], [IDX-2]: query_offset, as one integer for each batch element. */
function offsets(query_offset, { B, N, M }) {
  const list = Array.isArray(query_offset) ? query_offset : Array(B).fill(query_offset ?? M - N);
  const isRight = list.length === B && list.every(Number.isInteger);
  expect(isRight, "`query_offset`", `null, an integer or a list of B=${B} integers`, show(query_offset));
  const inRange = Array.isArray(query_offset) || N === 0 || (query_offset >= -(2 ** 31) && query_offset + N <= 2 ** 31);
  expect(inRange, "`query_offset`", "one that leaves all queries in [-2^31, 2^31)", query_offset);
  return list;
}

// ---- Chapter 3.1: mixing and interleaving ---------------------------------------------------------------------------

/** (1) to (4), [MIX-1] to [MIX-4]: mixed[b, n·P + p, h, :] = Σ_g alpha[g, h, p] · x[b, n, g, :]. */
function mix(x, alpha) {
  const [B, N, G, width] = x.shape;
  const [, H, P] = alpha.shape;
  const mixed = zeros(B, N * P, H, width);
  for (let b = 0; b < B; b++)
    for (let n = 0; n < N; n++)
      for (let p = 0; p < P; p++)
        for (let h = 0; h < H; h++)
          for (let j = 0; j < width; j++) {
            let sum = 0;
            for (let g = 0; g < G; g++) sum += alpha.data[at3(alpha, g, h, p)] * x.data[at4(x, b, n, g, j)];
            mixed.data[at4(mixed, b, n * P + p, h, j)] = sum;
          }
  return mixed;
}

// ---- Chapter 3.2: indices and visibility ----------------------------------------------------------------------------

/** [MASK-1] to [MASK-3]. */
function causalAllows({ causal }, tHat, s, nHat, m) {
  if (causal === "virtual") return s <= tHat;
  if (causal === "token") return m <= nHat;
  return true;
}

/** [WIN-1] to [WIN-3], [CFG-2]. */
function windowAllows({ causal, window, window_unit }, P, tHat, s, nHat, m) {
  if (window === null) return true;
  const W = Math.min(window, 2 ** 33); // [IDX-2] hides the same keys, and keeps W·P a whole number of float64
  const distance = window_unit === "virtual" ? tHat - s : nHat - m;
  const limit = window_unit === "virtual" ? W * P : W;
  return (causal === "none" ? Math.abs(distance) : distance) < limit;
}

/** [SEG-1]. Ids are compared as they are, as 64-bit integers. */
function segmentAllows({ segment_ids, kv_segment_ids }, b, n, m) {
  if (!segment_ids) return true;
  const kv = kv_segment_ids ?? segment_ids; // [ARG-3]
  return segment_ids.data[at2(segment_ids, b, n)] === kv.data[at2(kv, b, m)];
}

/** [KEY-1]. */
function keyMaskAllows({ key_mask }, b, m) {
  return !key_mask || key_mask.data[at2(key_mask, b, m)] === 1;
}

/**
 * (5), [IDX-1]: the virtual keys s that virtual query t of batch element b sees.
 * Whatever follows runs over this list only. So a hidden key is never even multiplied by 0, and the NaN or infinity
 * that it may hold reaches nothing: [KEY-2], [KEY-3].
 */
function visibleKeys(args, config, { M, P }, offset, b, t) {
  const p = t % P;
  const n = (t - p) / P;
  const nHat = n + offset[b];
  const tHat = nHat * P + p;
  const visible = [];
  for (let m = 0; m < M; m++) {
    if (!segmentAllows(args, b, n, m) || !keyMaskAllows(args, b, m)) continue;
    for (let s = m * P; s < (m + 1) * P; s++)
      if (causalAllows(config, tHat, s, nHat, m) && windowAllows(config, P, tHat, s, nHat, m)) visible.push(s);
  }
  return visible;
}

// ---- Chapter 3.3: rotary position embedding -------------------------------------------------------------------------

/** [POS-3]: a function from b and n to the position of a query token. */
function queryPosition({ positions }, offset) {
  return positions ? (b, n) => Number(positions.data[at2(positions, b, n)]) : (b, n) => n + offset[b];
}

/** [POS-3], [ARG-4]: a function from b and m to the position of a key token. */
function keyPosition({ positions, kv_positions }) {
  const given = kv_positions ?? positions;
  return given ? (b, m) => Number(given.data[at2(given, b, m)]) : (b, m) => m;
}

/** (6), [ROPE-1] to [ROPE-5], [POS-1], [POS-2]: rotates mixed queries or keys; `position` is one of the two above. */
function rotate(mixed, position, P, { rope, rope_theta, rope_pairing }) {
  if (rope === "none") return mixed;
  const [B, T, H, d] = mixed.shape;
  const rotated = zeros(B, T, H, d);
  for (let b = 0; b < B; b++)
    for (let t = 0; t < T; t++) {
      const p = t % P;
      const token = position(b, (t - p) / P);
      const at = rope === "virtual" ? token * P + p : token;
      for (let i = 0; i < d / 2; i++) {
        // [ROPE-5] Rounded are the exponent, the power (a library's pow errs by less than two roundings) and phi.
        const phi = at * rope_theta ** ((-2 * i) / d);
        const [cos, sin] = [Math.cos(phi), Math.sin(phi)];
        const [lane1, lane2] = rope_pairing === "half" ? [i, i + d / 2] : [2 * i, 2 * i + 1];
        for (let h = 0; h < H; h++) {
          const x1 = mixed.data[at4(mixed, b, t, h, lane1)];
          const x2 = mixed.data[at4(mixed, b, t, h, lane2)];
          rotated.data[at4(rotated, b, t, h, lane1)] = x1 * cos - x2 * sin;
          rotated.data[at4(rotated, b, t, h, lane2)] = x2 * cos + x1 * sin;
        }
      }
    }
  return rotated;
}

// ---- Chapter 3.4: logits, weights, weighted sum ---------------------------------------------------------------------

/** (7), [LOG-1]: the logit of virtual query t and virtual key s in head h. */
function logit(q, k, scale, b, h, t, s) {
  const d = q.shape[3];
  let sum = 0;
  for (let j = 0; j < d; j++) sum += q.data[at4(q, b, t, h, j)] * k.data[at4(k, b, s, h, j)];
  return scale * sum;
}

/** (8), (9), [SOFT-1] to [SOFT-3]: weights and lse of one row, from the logits of its visible keys, maybe none. */
function softmax(logits) {
  if (logits.length === 0) return { weights: [], lse: -Infinity };
  let mu = -Infinity;
  for (const l of logits) mu = Math.max(mu, l); // Math.max hands NaN on, as [KEY-3] wants
  const powers = logits.map((l) => Math.exp(l - mu));
  const total = powers.reduce((a, b) => a + b, 0); // at least 1, from the largest logit
  return { weights: powers.map((a) => a / total), lse: mu + Math.log(total) };
}

/** (7) to (10), for all queries and heads; `visible` is a function from b and t to the list of keys s. */
function attend(q, k, v, visible, config) {
  const [B, T, H, d] = q.shape;
  const [, S, , e] = v.shape;
  const scale = config.scale ?? 1 / Math.sqrt(d); // [LOG-2]
  const linear = config.normalisation === "none";
  const logits = zeros(B, H, T, S);
  const lse = zeros(B, H, T);
  const virtual_out = zeros(B, T, H, e);
  logits.data.fill(linear ? 0 : -Infinity); // [LOG-3], [LIN-1]: what hidden keys keep
  for (let b = 0; b < B; b++)
    for (let t = 0; t < T; t++) {
      const keys = visible(b, t);
      for (let h = 0; h < H; h++) {
        const row = keys.map((s) => logit(q, k, scale, b, h, t, s));
        const { weights, lse: rowLse } = linear ? { weights: row } : softmax(row);
        keys.forEach((s, index) => {
          logits.data[at4(logits, b, h, t, s)] = row[index];
          for (let c = 0; c < e; c++) // (10), [OUT-1]
            virtual_out.data[at4(virtual_out, b, t, h, c)] += weights[index] * v.data[at4(v, b, s, h, c)];
        });
        lse.data[at3(lse, b, h, t)] = rowLse;
      }
    }
  return linear ? { logits, virtual_out } : { logits, lse, virtual_out };
}

// ---- Chapter 3.5: collapse ------------------------------------------------------------------------------------------

/** (11), [COL-1], for R of shape (H, H, P); (12), [COL-2], for r of shape (H, P). */
function collapse(virtual_out, weights, P) {
  const [B, T, H, e] = virtual_out.shape;
  const N = T / P;
  const full = weights.shape.length === 3;
  const output = zeros(B, N, H, e);
  for (let b = 0; b < B; b++)
    for (let n = 0; n < N; n++)
      for (let i = 0; i < H; i++)
        for (let c = 0; c < e; c++) {
          let sum = 0;
          for (let h = full ? 0 : i; h < (full ? H : i + 1); h++)
            for (let p = 0; p < P; p++) {
              const weight = weights.data[full ? at3(weights, i, h, p) : at2(weights, h, p)];
              sum += weight * virtual_out.data[at4(virtual_out, b, n * P + p, h, c)];
            }
          output.data[at4(output, b, n, i, c)] = sum;
        }
  return output;
}

/** The operation: arguments of chapter 2, checked, to the stages of chapter 4 by their names [STG-1]. */
function attention(args, config, query_offset) {
  checkConfig(config);
  const sizes = checkArrays(args, config);
  const offset = offsets(query_offset, sizes);
  const { P } = sizes;

  const mixed_q = mix(args.q, args.alpha_q);
  const mixed_k = mix(args.k, args.alpha_k);
  const mixed_v = mix(args.v, args.alpha_v);
  const rotated_q = rotate(mixed_q, queryPosition(args, offset), P, config);
  const rotated_k = rotate(mixed_k, keyPosition(args), P, config);
  const visible = (b, t) => visibleKeys(args, config, sizes, offset, b, t);
  const attended = attend(rotated_q, rotated_k, mixed_v, visible, config);
  // [TYP-1] The output has the storage dtype, and is rounded to it when it is written. The other stages stay in
  // float64, as they were computed: a wider dtype will do for them [STG-2].
  const output = { ...collapse(attended.virtual_out, args.collapse, P), dtype: args.q.dtype };
  return { mixed_q, mixed_k, mixed_v, rotated_q, rotated_k, ...attended, output };
}

// ---- Chapter 8.1: exchange by files. Numbers [GEN-2] ----------------------------------------------------------------

/** Layout of the 16-bit formats: m bits of fraction, below the exponent, which is stored with `bias` added. */
const F16 = { m: 10, bias: 15 };
const BF16 = { m: 7, bias: 127 };
const infinityBits = ({ m, bias }) => (2 * bias + 1) * 2 ** m;

/** The number that 16 bits stand for. */
function decode(bits, format) {
  const { m, bias } = format;
  const sign = bits >= 0x8000 ? -1 : 1;
  const magnitude = bits & 0x7fff;
  if (magnitude >= infinityBits(format)) return magnitude === infinityBits(format) ? sign * Infinity : NaN;
  const exponent = Math.floor(magnitude / 2 ** m);
  const fraction = magnitude % 2 ** m;
  if (exponent === 0) return sign * fraction * 2 ** (1 - bias - m); // zero and subnormal numbers
  return sign * (fraction + 2 ** m) * 2 ** (exponent - bias - m);
}

/** The integer nearest to y, ties to even, for 0 <= y < 2^52: adding 2^52 leaves float64 no bits for a fraction. */
const roundToEven = (y) => y + 2 ** 52 - 2 ** 52;

/**
 * The 16 bits of the number nearest to x, ties to even [NUM-3]. It is found from the float64 itself: by way of float32
 * x would be rounded twice, and a number just above a tie could first become the tie and then be rounded down.
 */
function encode(x, format) {
  const { m, bias } = format;
  if (Number.isNaN(x)) return infinityBits(format) + 2 ** (m - 1);
  const view = new DataView(new ArrayBuffer(8));
  view.setFloat64(0, x);
  const upper = view.getUint16(0); // sign, 11 bits of exponent, and the first 4 of the fraction
  const signBit = upper & 0x8000;
  const exponent = Math.max(((upper & 0x7fff) >> 4) - 1023, 1 - bias); // below 1 - bias numbers are subnormal
  if (exponent > bias) return signBit + infinityBits(format);
  // In units of the last place; a normal number has 2^m to 2^(m+1) of them, whose leading bit adds 1 to the exponent
  // field, and so does rounding up to the next power of two, or to infinity.
  const units = roundToEven(Math.abs(x) / 2 ** (exponent - m));
  return signBit + (exponent + bias - 1) * 2 ** m + units;
}

const sixteenBits = (format) => [2, Float64Array,
  (view, i) => decode(view.getUint16(i, true), format),
  (view, i, x) => view.setUint16(i, encode(x, format), true)];

/**
 * [EXC-2] Bytes of an element, the class of the arrays, and how an element is read and written, in little-endian order.
 * `setFloat32` rounds float64 to nearest, ties to even.
 */
const DTYPES = {
  F64: [8, Float64Array, (view, i) => view.getFloat64(i, true), (view, i, x) => view.setFloat64(i, x, true)],
  F32: [4, Float64Array, (view, i) => view.getFloat32(i, true), (view, i, x) => view.setFloat32(i, x, true)],
  F16: sixteenBits(F16),
  BF16: sixteenBits(BF16),
  I64: [8, BigInt64Array, (view, i) => view.getBigInt64(i, true)],
  BOOL: [1, Uint8Array, (view, i) => view.getUint8(i)],
};

// ---- Chapter 8.1: exchange by files. Safetensors [EXC-2] ------------------------------------------------------------

function parse(what, text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new InputError(`${what}: expected JSON, got ${show(text.slice(0, 40))}`);
  }
}

const viewOf = (bytes) => new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
const isCounts = (x) => Array.isArray(x) && x.every((n) => Number.isSafeInteger(n) && n >= 0);

/** The array `name` from its entry in the header and the bytes after the header. */
function parseArray(name, entry, data) {
  expectKeys(entry, `header of \`${name}\``, ["dtype", "shape", "data_offsets"], InputError);
  const { dtype, shape, data_offsets } = entry;
  expect(Object.hasOwn(DTYPES, dtype), `\`${name}\` dtype`, Object.keys(DTYPES).join(" or "), show(dtype));
  expect(isCounts(shape), `\`${name}\` shape`, "a list of sizes", show(shape));
  const [bytes, Class, read] = DTYPES[dtype];
  const length = size(shape) * bytes;
  const [begin, end] = isCounts(data_offsets) && data_offsets.length === 2 ? data_offsets : [];
  const isRight = end <= data.length && end - begin === length;
  expect(isRight, `\`${name}\` data_offsets`, `${length} of ${data.length} bytes`, `${begin} to ${end}`);
  const view = viewOf(data.subarray(begin, end));
  const array = { dtype, shape, data: Class.from({ length: size(shape) }, (_, i) => read(view, i * bytes)) };
  expect(dtype !== "BOOL" || array.data.every((x) => x <= 1), `\`${name}\``, "bytes 0 and 1", "others");
  return array;
}

/** That the data are those of the tensors, without gaps or overlaps. */
function expectNoGaps(entries, data) {
  let place = 0;
  const inOrder = Object.values(entries).map((entry) => entry.data_offsets).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  for (const [begin, end] of [...inOrder, [data.length]]) {
    expect(begin === place, "data", `a tensor or the end at byte ${place}`, `one at byte ${begin}`);
    place = end;
  }
}

/** The arrays and the metadata of a file. */
function parseSafetensors(file) {
  expect(file.length >= 8, "file", "at least 8 bytes", file.length);
  const length = Number(file.readBigUInt64LE(0));
  expect(length <= file.length - 8, "header", `${length} bytes, as the first 8 say`, file.length - 8);
  const header = parse("header", file.toString("utf8", 8, 8 + length));
  expect(isObject(header), "header", "an object", show(header));
  const { __metadata__: metadata = {}, ...entries } = header;
  for (const name of Object.keys(entries))
    if (!ALL_ARRAYS.includes(name)) throw new Refusal(`header: \`${name}\` is not known to this port`);
  const data = file.subarray(8 + length);
  const arrays = {};
  for (const [name, entry] of Object.entries(entries)) arrays[name] = parseArray(name, entry, data);
  expectNoGaps(entries, data);
  return { arrays, metadata };
}

/** The file of these arrays, which are rounded to their dtypes here. */
function formatSafetensors(arrays) {
  const header = {};
  let place = 0;
  for (const [name, { dtype, shape }] of Object.entries(arrays)) {
    header[name] = { dtype, shape, data_offsets: [place, place + size(shape) * DTYPES[dtype][0]] };
    place = header[name].data_offsets[1];
  }
  const text = JSON.stringify(header);
  const head = Buffer.from(text.padEnd(Math.ceil(text.length / 8) * 8)); // so that the data begin at a multiple of 8
  const data = Buffer.alloc(place);
  for (const [name, array] of Object.entries(arrays)) {
    const [bytes, , , write] = DTYPES[array.dtype];
    const view = viewOf(data.subarray(...header[name].data_offsets));
    array.data.forEach((x, i) => write(view, i * bytes, x));
  }
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(head.length));
  return Buffer.concat([length, head, data]);
}

// ---- Chapter 8.1: exchange by files. The command --------------------------------------------------------------------

const KEYS = ["spec_version", "case_id", "dtype", "config", "query_offset", "wanted"];

/** [EXC-3], [EXC-4]: from the bytes of an input file to those of its output file. */
function runCase(file) {
  const { arrays, metadata } = parseSafetensors(file);
  expect(typeof metadata?.iha === "string", "metadata", "a text `iha`", "none");
  const call = parse("metadata `iha`", metadata.iha);
  const version = call?.spec_version;
  expect(typeof version === "string", "`spec_version`", "a text", show(version));
  if (!version.startsWith("1.")) throw new Refusal(`this port is of IHA 1.x, not of ${version}`);
  expectKeys(call, "metadata `iha`", KEYS, Refusal);
  const { dtype, config, query_offset, wanted } = call;
  expect(Object.hasOwn(FLOATS, dtype), "`dtype`", Object.keys(FLOATS).join(" or "), show(dtype));
  expect(arrays.q?.dtype === FLOATS[dtype], "`q` dtype", `${FLOATS[dtype]} for ${dtype}`, arrays.q?.dtype ?? "none");
  const areTexts = Array.isArray(wanted) && wanted.every((name) => typeof name === "string");
  expect(areTexts, "`wanted`", "a list of texts", show(wanted)); // names that are not known have no effect

  const stages = attention(arrays, config, query_offset);
  const isWanted = ([name]) => name === "output" || wanted.includes(name);
  return formatSafetensors(Object.fromEntries(Object.entries(stages).filter(isWanted)));
}

/** One line, also where a file's own texts are in it. */
const oneLine = (text) => text.replace(/[^ -~]+/g, "?").slice(0, 500);

/** What is wrong: a file, what the system refused, or, with its place, a mistake of this program. */
const describe = (error) => (error instanceof InputError || error.code ? error.message : error.stack);

/** The bytes of a file; nothing else is opened, since a pipe would be waited for. */
function readRegular(path) {
  const stat = statSync(path);
  expect(stat.isFile(), "file", "a regular file", "something else");
  if (stat.size > MAX_FILE) throw new Refusal(`a file of more than ${MAX_FILE} bytes is not read here`);
  return readFileSync(path);
}

/** What to write for an input file: the ending of the name, and the content; [EXC-5]. */
function answer(path) {
  try {
    return [".safetensors", runCase(readRegular(path))];
  } catch (error) {
    if (error instanceof Refusal) return [".skip", `${oneLine(error.message)}\n`];
    throw error;
  }
}

/** Whether `action` went well; if not it is said, and the others go on [EXC-6]. */
function attempt(path, action) {
  try {
    action();
    return true;
  } catch (error) {
    console.error(`iha.mjs: ${path}: ${oneLine(describe(error))}`);
    return false;
  }
}

function main(words) {
  if (words.length !== 2) {
    console.error("usage: node iha.mjs IN_DIR OUT_DIR");
    return 2;
  }
  const [inDir, outDir] = words;
  let names = [];
  const isListed = attempt(inDir, () => {
    names = readdirSync(inDir).filter((name) => name.endsWith(".safetensors")).sort();
    expect(names.length > 0, "folder", "files named *.safetensors", "none");
  });
  const results = names.map((name) => attempt(join(inDir, name), () => {
    const [ending, content] = answer(join(inDir, name));
    writeFileSync(join(outDir, name.replace(/\.safetensors$/, ending)), content);
  }));
  return isListed && results.every(Boolean) ? 0 : 1;
}

process.exitCode = main(process.argv.slice(2));
