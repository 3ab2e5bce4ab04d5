// Interleaved Head Attention, IHA 1.2: a port in C++17, written from SPEC.md alone.
//
//   build   g++ -std=c++17 -O2 -Wall -Wextra -Werror -o iha iha.cpp        (or clang++)
//   run     ./iha IN_DIR OUT_DIR                                           (SPEC.md 8.1)
//   judge   iha run --exec "./iha"
//
// This program is meant to be read, and copied into other languages. One file, nothing beyond the standard
// library. The operation comes first and follows SPEC.md: the same letters (chapter 1), the same order
// (chapter 3), and the ids of the requirements, such as [MIX-1], where they are met. Then come the number
// formats and the files. Speed is not a goal.
//
// It computes as a low-precision implementation does. A is the accumulator ([NUM-1]): double for
// float64 storage, float for the other three. Mixed, rotated and virtual_out arrays and the output are
// rounded to the storage dtype, as [NUM-3] allows; logits, weights and their sums stay in A.
//
// Exit status: 0 done, 1 a file that cannot be read or written (the others are done), 2 wrong usage.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fs = std::filesystem;
using Byte = unsigned char;
using Int = std::int64_t;
using Shape = std::vector<Int>;
using Names = std::vector<std::string>;

#ifdef __FAST_MATH__
#error "-ffast-math forgets NaN and infinities"
#endif
static_assert(std::numeric_limits<float>::is_iec559 && std::numeric_limits<double>::is_iec559, "IEEE needed");

// ---- Errors (chapter 7) ------------------------------------------------------------------------------

struct Malformed : std::runtime_error { using std::runtime_error::runtime_error; };     // [ERR-1]
struct Unsupported : std::runtime_error { using std::runtime_error::runtime_error; };   // [ERR-2]

[[noreturn]] void fail(const std::string& what, const std::string& expected, const std::string& found) {
    throw Malformed(what + ": expected " + expected + ", got " + found);
}

// ---- Arrays ------------------------------------------------------------------------------------------

constexpr Int max_elements = Int(1) << 26;      // of one array, also its largest size; a limit of this port
constexpr Int max_file = Int(1) << 28;          // bytes

std::string to_text(const Shape& shape) {       // as in JSON, which writes none differently
    std::string text = "[";
    for (Int size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
    return text + "]";
}

double element_count(const Shape& shape) {      // in a double, which does not wrap around
    double count = 1;
    for (Int size : shape) count *= double(size);
    return count;
}

template <class E>
struct Array {      // row-major: the last axis varies fastest (chapter 1)
    Shape shape;    // empty for an array that is not given
    std::vector<E> data;

    Array() = default;
    explicit Array(Shape sizes, E fill = E(0)) : shape(std::move(sizes)) {
        if (!(element_count(shape) <= double(max_elements)))
            throw Unsupported("an array of shape " + to_text(shape) + " is more than this port allocates");
        data.assign(std::size_t(element_count(shape)), fill);
    }
    explicit operator bool() const { return !shape.empty(); }

    // One element, by all its indices.
    template <class... I> E& at(I... index) { return data[offset(index...)]; }
    template <class... I> const E& at(I... index) const { return data[offset(index...)]; }
    // The last axis, by the indices of the others.
    template <class... I> E* row(I... index) { return data.data() + offset(index..., Int(0)); }
    template <class... I> const E* row(I... index) const { return data.data() + offset(index..., Int(0)); }

private:
    template <class... I> std::size_t offset(I... index) const {
        Int position = 0;
        std::size_t axis = 0;
        ((position = position * shape[axis++] + index), ...);
        return std::size_t(position);
    }
};

// ---- Configuration and arguments (chapters 5 and 2) --------------------------------------------------

enum class Dtype { F64, F32, F16, BF16, I64, BOOL };
enum class Kind { Virtual, Token, None };

struct Config {     // [CFG-1]
    Kind causal;
    std::optional<Int> window;
    Kind window_unit, rope;
    double rope_theta;
    bool adjacent_pairs;
    std::optional<double> scale;
    bool softmax;
};

template <class A>
struct Arguments {
    Int B, N, M, H, G, P, d, e;
    Dtype storage;
    Config config;
    Array<A> q, k, v, alpha_q, alpha_k, alpha_v, collapse;
    Array<Byte> key_mask;
    Array<Int> segment_ids, kv_segment_ids, positions, kv_positions;    // for keys too, if for queries
    std::vector<Int> query_offset;      // one for each batch element

    Int query_token(Int b, Int n) const { return n + query_offset[std::size_t(b)]; }      // n̂ of (5)
};

template <class A> using Stages = std::map<std::string, Array<A>>;      // by the names of [STG-1]

// Rounds to the storage dtype, once [NUM-3]; see the number formats below.
template <class A> A round_to(Dtype storage, A x);

template <class A>
void round_row(Dtype storage, A* row, Int width) {
    for (Int j = 0; j < width; ++j) row[j] = round_to(storage, row[j]);
}

// ---- 3.1 Mixing and interleaving ---------------------------------------------------------------------

// (1), (2), (3) [MIX-1, MIX-2, MIX-3]: x is q, k or v; the first axis of alpha is summed against its heads.
// (4) [MIX-4]: pseudo-head p of token n becomes row n·P + p.
template <class A>
Array<A> mix(const Array<A>& x, const Array<A>& alpha, Dtype storage) {
    const Int B = x.shape[0], tokens = x.shape[1], sources = x.shape[2], width = x.shape[3];
    const Int H = alpha.shape[1], P = alpha.shape[2];
    Array<A> mixed({B, tokens * P, H, width});
    for (Int b = 0; b < B; ++b)
        for (Int n = 0; n < tokens; ++n)
            for (Int p = 0; p < P; ++p)
                for (Int h = 0; h < H; ++h) {
                    A* row = mixed.row(b, n * P + p, h);
                    for (Int g = 0; g < sources; ++g) {
                        const A weight = alpha.at(g, h, p);
                        const A* source = x.row(b, n, g);
                        for (Int j = 0; j < width; ++j) row[j] += weight * source[j];
                    }
                    round_row(storage, row, width);
                }
    return mixed;
}

// ---- 3.2 Indices and visibility ----------------------------------------------------------------------

struct Index { Int token, row; };       // n̂ and t̂ of a query, m and s of a key: (5) [IDX-1]

bool causality_allows(const Config& config, Index query, Index key) {
    switch (config.causal) {
        case Kind::Virtual: return key.row <= query.row;        // [MASK-1]
        case Kind::Token: return key.token <= query.token;      // [MASK-2]
        default: return true;                                   // [MASK-3]
    }
}

// All products fit: |n̂|, m < 2^32, W <= 2^33 (as it was read) and P <= 2^26 [IDX-2].
bool window_allows(const Config& config, Index query, Index key, Int P) {
    if (!config.window) return true;                            // [CFG-2]
    const bool by_row = config.window_unit == Kind::Virtual;
    Int distance = by_row ? query.row - key.row : query.token - key.token;
    if (config.causal == Kind::None) distance = std::abs(distance);             // [WIN-3]
    return distance < (by_row ? *config.window * P : *config.window);           // [WIN-1], [WIN-2]
}

template <class A>
bool visible(const Arguments<A>& in, Int b, Int t, Int s) {
    const Int n = t / in.P, p = t % in.P, m = s / in.P, token = in.query_token(b, n);
    if (in.key_mask && !in.key_mask.at(b, m)) return false;                                         // [KEY-1]
    if (in.segment_ids && in.segment_ids.at(b, n) != in.kv_segment_ids.at(b, m)) return false;      // [SEG-1]
    const Index query{token, token * in.P + p}, key{m, s};
    return causality_allows(in.config, query, key) && window_allows(in.config, query, key, in.P);
}

// ---- 3.3 Rotary position embedding -------------------------------------------------------------------

// (6) [ROPE-1]: rotates mixed queries or mixed keys; token_position(b, n) is the position of a token.
template <class A, class Position>
Array<A> rotate(const Arguments<A>& in, const Array<A>& mixed, Position token_position) {
    const Config& config = in.config;
    Array<A> rotated = mixed;
    if (config.rope == Kind::None) return rotated;                      // [POS-2]
    for (Int b = 0; b < mixed.shape[0]; ++b)
        for (Int t = 0; t < mixed.shape[1]; ++t) {
            double position = double(token_position(b, t / in.P));
            if (config.rope == Kind::Virtual)                           // [POS-1]
                position = position * double(in.P) + double(t % in.P);
            for (Int i = 0; i < in.d / 2; ++i) {
                // [ROPE-4]; in double, and then cast to the accumulator [ROPE-5]
                const double angle = position * std::pow(config.rope_theta, -2.0 * double(i) / double(in.d));
                const A cosine = A(std::cos(angle)), sine = A(std::sin(angle));
                const Int lane1 = config.adjacent_pairs ? 2 * i : i;                    // [ROPE-3], [ROPE-2]
                const Int lane2 = config.adjacent_pairs ? 2 * i + 1 : i + in.d / 2;
                for (Int h = 0; h < in.H; ++h) {
                    const A x1 = mixed.at(b, t, h, lane1), x2 = mixed.at(b, t, h, lane2);
                    rotated.at(b, t, h, lane1) = round_to(in.storage, x1 * cosine - x2 * sine);
                    rotated.at(b, t, h, lane2) = round_to(in.storage, x2 * cosine + x1 * sine);
                }
            }
        }
    return rotated;
}

// [POS-3]
template <class A>
Array<A> rotate_queries(const Arguments<A>& in, const Array<A>& mixed_q) {
    return rotate(in, mixed_q, [&](Int b, Int n) {
        return in.positions ? in.positions.at(b, n) : in.query_token(b, n); });
}

template <class A>
Array<A> rotate_keys(const Arguments<A>& in, const Array<A>& mixed_k) {
    return rotate(in, mixed_k, [&](Int b, Int m) { return in.kv_positions ? in.kv_positions.at(b, m) : m; });
}

// ---- 3.4 Logits, weights, weighted sum ---------------------------------------------------------------

// (7) [LOG-1]. The scale stays a double: it need not be a number of the accumulator [LOG-2].
template <class A>
A logit(const A* q, const A* k, Int d, double scale) {
    A sum = 0;
    for (Int j = 0; j < d; ++j) sum += q[j] * k[j];
    return A(scale * double(sum));
}

// (8), (9) and (10) for one virtual query and head, one visible key after the other. `out` holds
// Σ e^(l − maximum)·v and `sum` Σ e^(l − maximum), both against the maximum so far [SOFT-1].
template <class A>
struct RunningSoftmax {
    A maximum = -std::numeric_limits<A>::infinity();
    A sum = 0;

    void add(A l, const A* v, A* out, Int e) {
        if (!(l <= maximum)) {      // a new maximum, or a NaN, which must not get lost [KEY-3]
            const A shrink = std::exp(maximum - l);     // 0 at the first key
            sum *= shrink;
            for (Int j = 0; j < e; ++j) out[j] *= shrink;
            maximum = l;
        }
        const A weight = std::exp(l - maximum);
        sum += weight;
        for (Int j = 0; j < e; ++j) out[j] += weight * v[j];
    }
    void finish(A* out, Int e) const {
        if (sum == A(0)) return;    // no key was seen: zeros [SOFT-2]
        for (Int j = 0; j < e; ++j) out[j] /= sum;
    }
    A lse() const { return sum == A(0) ? maximum : maximum + std::log(sum); }       // [SOFT-3]
};

// From rotated_q, rotated_k and mixed_v to logits, where wanted, lse and virtual_out. Hidden keys are passed
// over, so that nothing they hold can have an influence [KEY-2, KEY-3, LOG-3].
template <class A>
void attend(const Arguments<A>& in, Stages<A>& stages, bool logits_wanted) {
    const Array<A> &q = stages["rotated_q"], &k = stages["rotated_k"], &v = stages["mixed_v"];
    const Int T = in.N * in.P, S = in.M * in.P;
    const double scale = in.config.scale ? *in.config.scale : 1.0 / std::sqrt(double(in.d));        // [LOG-2]
    const A hidden = in.config.softmax ? -std::numeric_limits<A>::infinity() : A(0);                // [LOG-3]
    Array<A> logits, lse({in.B, in.H, T}), virtual_out({in.B, T, in.H, in.e});
    if (logits_wanted) logits = Array<A>({in.B, in.H, T, S}, hidden);
    for (Int b = 0; b < in.B; ++b)
        for (Int h = 0; h < in.H; ++h)
            for (Int t = 0; t < T; ++t) {
                RunningSoftmax<A> softmax;
                A* out = virtual_out.row(b, t, h);              // zeros so far
                for (Int s = 0; s < S; ++s) {
                    if (!visible(in, b, t, s)) continue;
                    const A l = logit(q.row(b, t, h), k.row(b, s, h), in.d, scale);
                    const A* value = v.row(b, s, h);
                    if (logits) logits.at(b, h, t, s) = l;
                    if (in.config.softmax) softmax.add(l, value, out, in.e);
                    else for (Int j = 0; j < in.e; ++j) out[j] += l * value[j];     // [LIN-1]
                }
                if (in.config.softmax) softmax.finish(out, in.e);
                lse.at(b, h, t) = softmax.lse();
                round_row(in.storage, out, in.e);               // (10) [OUT-1]
            }
    if (logits) stages["logits"] = std::move(logits);
    if (in.config.softmax) stages["lse"] = std::move(lse);
    stages["virtual_out"] = std::move(virtual_out);
}

// ---- 3.5 Collapse ------------------------------------------------------------------------------------

template <class A>
Array<A> collapse(const Arguments<A>& in, const Array<A>& virtual_out) {
    const bool full = in.collapse.shape.size() == 3;
    Array<A> output({in.B, in.N, in.H, in.e});
    for (Int b = 0; b < in.B; ++b)
        for (Int n = 0; n < in.N; ++n)
            for (Int i = 0; i < in.H; ++i) {
                A* row = output.row(b, n, i);
                for (Int h = full ? 0 : i; h < (full ? in.H : i + 1); ++h)      // r has source head i alone
                    for (Int p = 0; p < in.P; ++p) {
                        const A weight = full ? in.collapse.at(i, h, p)         // (11) [COL-1]
                                              : in.collapse.at(h, p);           // (12) [COL-2]
                        const A* source = virtual_out.row(b, n * in.P + p, h);
                        for (Int j = 0; j < in.e; ++j) row[j] += weight * source[j];
                    }
                round_row(in.storage, row, in.e);
            }
    return output;
}

// The whole operation.
template <class A>
Stages<A> attention(const Arguments<A>& in, bool logits_wanted) {
    Stages<A> stages;
    stages["mixed_q"] = mix(in.q, in.alpha_q, in.storage);
    stages["mixed_k"] = mix(in.k, in.alpha_k, in.storage);
    stages["mixed_v"] = mix(in.v, in.alpha_v, in.storage);
    stages["rotated_q"] = rotate_queries(in, stages["mixed_q"]);
    stages["rotated_k"] = rotate_keys(in, stages["mixed_k"]);
    attend(in, stages, logits_wanted);
    stages["output"] = collapse(in, stages["virtual_out"]);
    return stages;
}

// ---- Number formats [TYP-1, EXC-2] -------------------------------------------------------------------

struct DtypeInfo { const char* name; Int bytes; };
constexpr DtypeInfo dtypes[] = {{"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8}, {"BOOL", 1}};

const DtypeInfo& info(Dtype dtype) { return dtypes[std::size_t(dtype)]; }

template <class To, class From>
To bit_copy(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

float from_bfloat16(std::uint16_t bits) { return bit_copy<float>(std::uint32_t(bits) << 16); }

std::uint16_t to_bfloat16(float x) {
    const auto bits = bit_copy<std::uint32_t>(x);
    if (std::isnan(x)) return std::uint16_t(bits >> 16 | 0x40);     // rounding could turn it into an infinity
    return std::uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16); // to nearest, ties to even
}

float from_float16(std::uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float x = std::ldexp(float(1024 + fraction), exponent - 25);
    if (exponent == 0) x = std::ldexp(float(fraction), -24);        // zero and subnormal numbers
    if (exponent == 31) x = fraction ? std::nanf("") : INFINITY;
    return bits & 0x8000 ? -x : x;
}

std::uint16_t to_float16(float x) {
    const auto bits = bit_copy<std::uint32_t>(x);
    const std::uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    std::uint32_t half;
    if (std::isnan(x)) half = 0x7E00;
    else if (std::fabs(x) >= 65520.0f) half = 0x7C00;       // halfway beyond the largest number: infinity
    else if (std::fabs(x) < 0x1p-14f)                       // subnormal: units of 2^-24, ties to even
        half = std::uint32_t(std::nearbyint(std::fabs(x) * 0x1p24f));
    else                                                    // change the bias from 127 to 15, drop 13 bits
        half = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
    return std::uint16_t(sign | half);
}

// float16 and bfloat16 have the accumulator float, so there is never a double to be rounded twice.
template <class A>
A round_to(Dtype storage, A x) {
    if (storage == Dtype::F16) return A(from_float16(to_float16(float(x))));
    if (storage == Dtype::BF16) return A(from_bfloat16(to_bfloat16(float(x))));
    return x;
}

std::uint64_t load(const char* bytes, Int count) {     // little-endian, on any host
    std::uint64_t value = 0;
    for (Int i = 0; i < count; ++i) value |= std::uint64_t(Byte(bytes[i])) << 8 * i;
    return value;
}

void store(std::string& bytes, std::uint64_t value, Int count) {
    for (Int i = 0; i < count; ++i) bytes += char(value >> 8 * i & 0xFF);
}

// A number of a file as a number of E, which holds all numbers of the dtype.
template <class E>
E decode(const char* bytes, Dtype dtype) {
    const std::uint64_t bits = load(bytes, info(dtype).bytes);
    switch (dtype) {
        case Dtype::F64: return E(bit_copy<double>(bits));
        case Dtype::F32: return E(bit_copy<float>(std::uint32_t(bits)));
        case Dtype::F16: return E(from_float16(std::uint16_t(bits)));
        case Dtype::BF16: return E(from_bfloat16(std::uint16_t(bits)));
        default: return E(bit_copy<Int>(bits));
    }
}

// The bits of a number in a dtype, where it has been rounded to it.
template <class A>
std::uint64_t encode(A x, Dtype dtype) {
    switch (dtype) {
        case Dtype::F64: return bit_copy<std::uint64_t>(double(x));
        case Dtype::F32: return bit_copy<std::uint32_t>(float(x));
        case Dtype::F16: return to_float16(float(x));
        default: return to_bfloat16(float(x));
    }
}

// ---- JSON --------------------------------------------------------------------------------------------

struct Json {
    enum Type { Null, Boolean, Number, Text, List, Object } type = Null;
    std::string text;           // of a text, what it says; of a number, as it is written
    Names keys;                 // of an object; items are its values, in the same order
    std::vector<Json> items;    // of a list or an object

    std::string describe() const {
        static const char* const names[] = {"null", "a boolean", "", "", "a list", "an object"};
        return type == Number ? text : type == Text ? "\"" + text + "\"" : names[type];
    }
    const Json& expect(Type wanted, const std::string& what, const std::string& expected) const {
        if (type != wanted) fail(what, expected, describe());
        return *this;
    }
    double number(const std::string& what) const {
        return std::strtod(expect(Number, what, "a number").text.c_str(), nullptr);
    }
    Int whole(Int low, Int high, const std::string& what) const {      // exact within 2^53, which will do
        const double x = number(what);
        if (x >= double(low) && x <= double(high) && x == std::floor(x)) return Int(x);
        fail(what, "a whole number from " + std::to_string(low) + " to " + std::to_string(high), text);
    }
    const Json& get(const std::string& key) const {
        for (std::size_t i = 0; i < keys.size(); ++i)
            if (keys[i] == key) return items[i];
        fail("`" + key + "`", "a value", "none");
    }
    // Throws Unknown for an object with other keys than these.
    template <class Unknown>
    void only(const Names& known, const std::string& what) const {
        for (const std::string& key : expect(Object, what, "an object").keys)
            if (std::find(known.begin(), known.end(), key) == known.end())
                throw Unknown(what + ": `" + key + "` is not known to this port");
    }
};

// Reads all JSON, and a little that is none: numbers in other forms that strtod reads.
class JsonReader {
public:
    JsonReader(const std::string& text, std::string name) : source(text), what(std::move(name)) {}

    Json read() {
        Json json = value(0);
        if (peek(), at < source.size()) stop("its end");
        return json;
    }

private:
    static constexpr int max_depth = 32;
    const std::string& source;
    const std::string what;     // for messages
    std::size_t at = 0;

    [[noreturn]] void stop(const std::string& expected) const {
        fail(what, "JSON with " + expected + " at byte " + std::to_string(at), "something else");
    }
    bool one_of(const std::string& set) const {
        return at < source.size() && set.find(source[at]) != std::string::npos;
    }
    char peek() {       // what comes after spaces; no JSON holds a '\0'
        while (one_of(" \t\n\r")) ++at;
        return at < source.size() ? source[at] : '\0';
    }
    bool accept(const std::string& word) {
        const bool found = peek() == word[0] && source.compare(at, word.size(), word) == 0;
        if (found) at += word.size();
        return found;
    }
    void expect(const std::string& word) { if (!accept(word)) stop(word); }

    Json value(int depth) {
        if (depth > max_depth) stop("at most " + std::to_string(max_depth) + " levels");
        Json json;
        if (accept("{")) json.type = Json::Object, fill(json, "}", depth);
        else if (accept("[")) json.type = Json::List, fill(json, "]", depth);
        else if (peek() == '"') json.type = Json::Text, json.text = text();
        else if (one_of("-0123456789")) json.type = Json::Number, json.text = number();
        else if (accept("true") || accept("false")) json.type = Json::Boolean;      // no field is boolean
        else if (!accept("null")) stop("a value");
        return json;
    }
    void fill(Json& json, const char* close, int depth) {
        if (accept(close)) return;
        std::set<std::string> seen;
        do {
            if (json.type == Json::Object) {
                json.keys.push_back(text());
                if (!seen.insert(json.keys.back()).second) stop("each key only once");
                expect(":");
            }
            json.items.push_back(value(depth + 1));
        } while (accept(","));
        expect(close);
    }
    std::string number() {
        const std::size_t begin = at;
        while (one_of("+-.eE0123456789")) ++at;
        const std::string result = source.substr(begin, at - begin);
        char* end = nullptr;
        std::strtod(result.c_str(), &end);      // in the locale "C", in which a program starts
        if (*end) stop("a number");
        return result;
    }
    std::string text() {
        static const std::string letters = "\"\\/bfnrt", meanings = "\"\\/\b\f\n\r\t";
        std::string result;
        expect("\"");
        for (; at < source.size() && source[at] != '"'; ++at) {
            if (Byte(source[at]) < 0x20) stop("the end of a text");
            if (source[at] != '\\') result += source[at];
            else if (++at, one_of(letters)) result += meanings[letters.find(source[at])];
            else if (one_of("u")) result += four_digits();
            else stop("an escape");
        }
        expect("\"");
        return result;
    }
    // What \u stands for in ASCII. Other characters stay as they are written: no name that is known has any.
    std::string four_digits() {
        const std::string hex = source.substr(at + 1, 4);
        if (hex.size() < 4 || hex.find_first_not_of("0123456789abcdefABCDEF") < 4) stop("4 digits");
        at += 4;
        const int code = std::stoi(hex, nullptr, 16);
        return code < 0x80 ? std::string(1, char(code)) : "\\u" + hex;
    }
};

// ---- Files of tensors: the safetensors format [EXC-2] ------------------------------------------------

struct Tensor { Dtype dtype; Shape shape; Int begin, end; };

struct File {
    std::string data;
    std::map<std::string, Tensor> tensors;
    std::string about;      // the metadata `iha`, a text in JSON

    const Tensor& get(const std::string& name, std::size_t axes) const {
        const auto found = tensors.find(name);
        if (found == tensors.end()) fail("`" + name + "`", "a tensor", "none");
        if (found->second.shape.size() != axes)
            fail("`" + name + "` shape", std::to_string(axes) + " axes", to_text(found->second.shape));
        return found->second;
    }
};

// A text as the number of its place in `choices`.
std::size_t choose(const Json& json, const std::string& what, const Names& choices) {
    std::string expected;
    for (std::size_t i = 0; i < choices.size(); ++i) {
        if (json.type == Json::Text && json.text == choices[i]) return i;
        expected += (i ? " or \"" : "\"") + choices[i] + "\"";
    }
    fail(what, expected, json.describe());
}

Tensor read_entry(const std::string& name, const Json& entry, Int data_size) {
    const std::string what = "`" + name + "`";
    entry.only<Malformed>({"dtype", "shape", "data_offsets"}, what);
    Names names;
    for (const DtypeInfo& dtype : dtypes) names.push_back(dtype.name);
    Tensor tensor{Dtype(choose(entry.get("dtype"), what + " dtype", names)), {}, 0, 0};
    for (const Json& size : entry.get("shape").expect(Json::List, what + " shape", "a list").items)
        tensor.shape.push_back(size.whole(0, Int(1) << 53, what + " shape"));
    const Json& offsets = entry.get("data_offsets").expect(Json::List, what + " data_offsets", "a list");
    if (offsets.items.size() != 2) fail(what + " data_offsets", "two", std::to_string(offsets.items.size()));
    tensor.begin = offsets.items[0].whole(0, data_size, what + " data_offsets");
    tensor.end = offsets.items[1].whole(0, data_size, what + " data_offsets");
    if (double(tensor.end - tensor.begin) != element_count(tensor.shape) * double(info(tensor.dtype).bytes))
        fail(what + " data_offsets", "the bytes of shape " + to_text(tensor.shape),
             std::to_string(tensor.end - tensor.begin));
    return tensor;
}

void expect_no_gaps(const File& file) {
    std::vector<std::pair<Int, Int>> extents = {{Int(file.data.size()), Int(file.data.size())}};
    for (const auto& [name, tensor] : file.tensors) extents.emplace_back(tensor.begin, tensor.end);
    std::sort(extents.begin(), extents.end());
    Int end = 0;
    for (const auto& extent : extents) {
        if (extent.first != end) fail("data", "no gap or overlap", "one at byte " + std::to_string(end));
        end = extent.second;
    }
}

File read_file(const fs::path& path) {
    std::ifstream stream;
    if (fs::is_regular_file(path)) stream.open(path, std::ios::binary);
    if (!stream.is_open()) fail("file", "a regular file that can be read", "something else");
    if (fs::file_size(path) > std::uintmax_t(max_file))
        throw Unsupported("a file of more than " + std::to_string(max_file) + " bytes is not read here");
    const std::string bytes{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
    if (bytes.size() < 8) fail("file", "at least 8 bytes", std::to_string(bytes.size()));
    const std::uint64_t length = load(bytes.data(), 8);
    if (length > bytes.size() - 8)
        fail("header", std::to_string(length) + " bytes", std::to_string(bytes.size() - 8));

    File file;
    file.data = bytes.substr(8 + std::size_t(length));
    const std::string text = bytes.substr(8, std::size_t(length));
    const Json header = JsonReader(text, "header").read().expect(Json::Object, "header", "an object");
    header.only<Unsupported>({"q", "k", "v", "alpha_q", "alpha_k", "alpha_v", "collapse", "key_mask",
                              "segment_ids", "kv_segment_ids", "positions", "kv_positions", "__metadata__"},
                             "header");
    for (std::size_t i = 0; i < header.keys.size(); ++i) {
        const Json& entry = header.items[i];
        if (header.keys[i] != "__metadata__")
            file.tensors[header.keys[i]] = read_entry(header.keys[i], entry, Int(file.data.size()));
        else
            file.about = entry.get("iha").expect(Json::Text, "`iha`", "a text").text;
    }
    expect_no_gaps(file);
    return file;
}

// A file of those stages that are wanted [EXC-4].
template <class A>
std::string format_stages(const Stages<A>& stages, Dtype storage, const std::set<std::string>& wanted) {
    const Dtype wide = storage == Dtype::F64 ? Dtype::F64 : Dtype::F32;     // [NUM-2], [STG-2]
    std::string header, data, bytes;
    for (const auto& [name, array] : stages) {
        if (!wanted.count(name)) continue;
        const Dtype dtype = name == "logits" || name == "lse" ? wide : storage;
        const std::size_t begin = data.size();
        for (A x : array.data) store(data, encode(x, dtype), info(dtype).bytes);
        header += (header.empty() ? "{\"" : ", \"") + name + "\": {\"dtype\": \"" + info(dtype).name;
        header += "\", \"shape\": " + to_text(array.shape);
        header += ", \"data_offsets\": " + to_text({Int(begin), Int(data.size())}) + "}";
    }
    header += "}";
    header.append((8 - header.size() % 8) % 8, ' ');        // so that the data begin at a multiple of 8
    store(bytes, header.size(), 8);
    return bytes + header + data;
}

// ---- One case: reading and checking it [EXC-3, ERR-1] ------------------------------------------------

double read_positive(const Json& json, const std::string& what) {
    const double x = json.number(what);
    if (!(x > 0 && std::isfinite(x))) fail(what, "a finite number > 0", json.text);
    return x;
}

Config read_config(const Json& json) {      // [CFG-1]
    json.only<Unsupported>({"causal", "window", "window_unit", "rope", "rope_theta", "rope_pairing", "scale",
                            "normalisation"}, "config");
    const auto choice = [&](const char* field, const Names& choices) {
        return choose(json.get(field), "`" + std::string(field) + "`", choices); };
    Config config{};
    config.causal = Kind(choice("causal", {"virtual", "token", "none"}));
    config.window_unit = Kind(choice("window_unit", {"virtual", "token"}));
    config.rope = Kind(choice("rope", {"virtual", "token", "none"}));
    config.rope_theta = read_positive(json.get("rope_theta"), "`rope_theta`");
    config.adjacent_pairs = choice("rope_pairing", {"half", "adjacent"}) == 1;
    config.softmax = choice("normalisation", {"softmax", "none"}) == 0;
    const Json &scale = json.get("scale"), &window = json.get("window");
    if (scale.type != Json::Null) config.scale = read_positive(scale, "`scale`");
    if (window.type == Json::Null) return config;
    if (window.number("`window`") > 0x1p33) config.window = Int(1) << 33;      // hides the same keys [IDX-2]
    else config.window = window.whole(1, Int(1) << 33, "`window`");
    return config;
}

std::vector<Int> read_query_offset(const Json& json, Int B, Int N, Int M) {     // [ARG-1, ARG-2]
    const auto read = [N](const Json& number) {     // all queries have indices in [-2^31, 2^31) [IDX-2]
        return number.whole(-(Int(1) << 31), (Int(1) << 31) - std::max<Int>(N, 1), "`query_offset`"); };
    if (json.type != Json::List)
        return std::vector<Int>(std::size_t(B), json.type == Json::Null ? M - N : read(json));
    if (Int(json.items.size()) != B) fail("`query_offset`", to_text({B}), to_text({Int(json.items.size())}));
    std::vector<Int> offsets;
    for (const Json& number : json.items) offsets.push_back(read(number));
    return offsets;
}

// The tensor of an argument, checked [DIM-1, TYP-1, TYP-2, TYP-3].
template <class E>
Array<E> read_array(const File& file, const std::string& name, const Shape& shape, Dtype dtype) {
    const Tensor& tensor = file.get(name, shape.size());
    if (tensor.dtype != dtype) fail("`" + name + "` dtype", info(dtype).name, info(tensor.dtype).name);
    if (tensor.shape != shape) fail("`" + name + "` shape", to_text(shape), to_text(tensor.shape));
    Array<E> array(shape);
    const char* bytes = file.data.data() + tensor.begin;
    for (E& x : array.data) {
        x = decode<E>(bytes, dtype);
        bytes += info(dtype).bytes;
        if (dtype == Dtype::BOOL && x > E(1)) fail("`" + name + "`", "bytes 0 or 1", std::to_string(Int(x)));
    }
    return array;
}

template <class A>
Arguments<A> read_arguments(const File& file, const Json& about, Dtype storage) {
    const Config config = read_config(about.get("config"));
    const Shape q = file.get("q", 4).shape, k = file.get("k", 4).shape, v = file.get("v", 4).shape;
    const Tensor& alpha = file.get("alpha_q", 3);
    const Int B = q[0], N = q[1], M = k[1], H = q[2], G = k[2], P = alpha.shape[2], d = q[3], e = v[3];
    if (std::min({H, G, P, d, e}) < 1) fail("sizes H, G, P, d, e", "at least 1", to_text({H, G, P, d, e}));
    if (std::max({B, N, M, H, G, P, d, e}) > max_elements) throw Unsupported("a size is beyond 2^26");
    if (config.rope != Kind::None && d % 2) fail("`q` shape", "an even d with rope", to_text(q)); // [ROPE-6]

    const auto has = [&](const std::string& name) { return file.tensors.count(name) == 1; };
    const auto integers = [&](const std::string& name, const Shape& shape) {
        return has(name) ? read_array<Int>(file, name, shape, Dtype::I64) : Array<Int>(); };
    for (const std::string name : {"segment_ids", "positions"})
        if (has("kv_" + name) && !has(name)) fail("`" + name + "`", "a tensor, as for keys", "none");
    const bool wider = (storage == Dtype::F16 || storage == Dtype::BF16) && alpha.dtype == Dtype::F32;
    const Dtype parameter = wider ? Dtype::F32 : storage;                                         // [TYP-2]
    const bool per_head = has("collapse") && file.tensors.at("collapse").shape.size() == 2;       // [COL-2]
    return {B, N, M, H, G, P, d, e, storage, config,
            read_array<A>(file, "q", {B, N, H, d}, storage),
            read_array<A>(file, "k", {B, M, G, d}, storage),
            read_array<A>(file, "v", {B, M, G, e}, storage),
            read_array<A>(file, "alpha_q", {H, H, P}, parameter),
            read_array<A>(file, "alpha_k", {G, H, P}, parameter),
            read_array<A>(file, "alpha_v", {G, H, P}, parameter),
            read_array<A>(file, "collapse", per_head ? Shape{H, P} : Shape{H, H, P}, parameter),
            has("key_mask") ? read_array<Byte>(file, "key_mask", {B, M}, Dtype::BOOL) : Array<Byte>(),
            integers("segment_ids", {B, N}),
            integers(has("kv_segment_ids") ? "kv_segment_ids" : "segment_ids", {B, M}),         // [ARG-3]
            integers("positions", {B, N}),
            integers(has("kv_positions") ? "kv_positions" : "positions", {B, M}),               // [ARG-4]
            read_query_offset(about.get("query_offset"), B, N, M)};
}

// ---- The command [EXC-1, EXC-4, EXC-5, EXC-6] --------------------------------------------------------

template <class A>
std::string run_as(const File& file, const Json& about, Dtype storage) {
    std::set<std::string> wanted = {"output"};      // of the others, names that are not known have no effect
    for (const Json& name : about.get("wanted").expect(Json::List, "`wanted`", "a list").items)
        wanted.insert(name.expect(Json::Text, "`wanted`", "texts").text);
    const auto in = read_arguments<A>(file, about, storage);
    return format_stages(attention(in, wanted.count("logits") == 1), storage, wanted);
}

// From the bytes of an input file to those of its output file.
std::string run(const File& file) {
    const Json about = JsonReader(file.about, "`iha`").read().expect(Json::Object, "`iha`", "an object");
    const std::string version = about.get("spec_version").expect(Json::Text, "`spec_version`", "a text").text;
    if (version.compare(0, 2, "1.") != 0) throw Unsupported("this port is of IHA 1.x, not of " + version);
    about.only<Unsupported>({"spec_version", "case_id", "dtype", "config", "query_offset", "wanted"}, "iha");
    const Names dtype_names = {"float64", "float32", "float16", "bfloat16"};
    const auto storage = Dtype(choose(about.get("dtype"), "`dtype`", dtype_names));
    return storage == Dtype::F64 ? run_as<double>(file, about, storage) : run_as<float>(file, about, storage);
}

std::string one_line(std::string text) {        // also where a file's own texts are in it
    for (char& c : text)
        if (c < 0x20 || c > 0x7E) c = '?';
    return text.substr(0, 500) + "\n";
}

void run_file(const fs::path& source, fs::path target) {
    std::string result;
    try {
        result = run(read_file(source));
    } catch (const Unsupported& reason) {       // [EXC-5]
        result = one_line(reason.what());
        target.replace_extension(".skip");
    }
    std::ofstream stream(target, std::ios::binary);
    stream << result;
    stream.close();
    if (!stream) fail("output " + target.string(), "a file that can be written", "an error of the system");
}

int main(int argc, char** argv) {
    if (argc != 3) {
        std::cerr << "usage: iha IN_DIR OUT_DIR\n";
        return 2;
    }
    int status = 0;
    const auto attempt = [&status](const fs::path& path, const auto& action) {
        try {
            action();
        } catch (const std::exception& error) {     // [EXC-6]; also no memory, and errors of the system
            std::cerr << "iha: " << path.string() << ": " << one_line(error.what());
            status = 1;
        }
    };
    std::vector<fs::path> sources;
    attempt(argv[1], [&] {
        for (const auto& entry : fs::directory_iterator(argv[1]))
            if (entry.path().extension() == ".safetensors") sources.push_back(entry.path());
        if (sources.empty()) fail("folder", "files named *.safetensors", "none");
    });
    std::sort(sources.begin(), sources.end());
    for (const fs::path& source : sources)
        attempt(source, [&] { run_file(source, fs::path(argv[2]) / source.filename()); });
    return status;
}
