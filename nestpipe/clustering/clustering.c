// Key-centric sample clustering, sequential and in integers. clustering.py states the objective and the method.
// numpy_form.py has the same algorithm in numpy, and both give the same parts.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint16_t count; // samples of a part that have a key
    uint16_t which; // the exclusive or of their numbers; if there is only one, its number
} Held;

typedef struct {
    int samples, parts, keys;
    int32_t *first, *of_sample;  // [samples + 1], [pins]: the shared keys of each sample
    int32_t *key_first, *of_key; // [keys + 1], [pins]: the samples of each key
    Held *held;                  // [keys, parts]
    int32_t *near;               // [parts, samples]: keys of a sample that *other* samples of a part have as well
    int32_t *own;                // [samples]: near of the sample's own part
    int32_t *part;               // [samples]: -1 while the sample has no part
} Problem;

// For the scans over all samples: uses the widest vectors that the machine has.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORISED
#endif

typedef struct {
    int64_t key;
    int32_t id; // -1: free
} Slot;

typedef struct {
    int32_t last, degree; // the latest sample that has the key; how many samples have it
} Seen;

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
    return x ^ (x >> 32);
}

// The next ``bytes`` of one piece of memory. If ``begin`` is NULL, they are only counted.
static void *take(char *begin, int64_t *used, int64_t bytes) {
    void *at = begin ? begin + *used : NULL;
    *used += (bytes + 63) / 64 * 64;
    return at;
}

typedef struct {
    Problem p;
    int64_t slots;
    Slot *slot; // [slots]
    Seen *seen; // [pins]
    int32_t *id; // [pins]
    int64_t *common; // [samples]
    int32_t *mark, *near_x, *gain; // [keys], [parts], [samples]
} Work;

static Work lay_out(char *begin, int64_t *used, int64_t pins, int64_t samples, int64_t parts) {
    Work w = {.p = {.samples = samples, .parts = parts}, .slots = 16};
    int64_t keys = pins / 2; // each has two samples or more
    while (w.slots < 2 * pins) w.slots *= 2;
    w.slot = take(begin, used, w.slots * sizeof *w.slot), w.seen = take(begin, used, pins * sizeof *w.seen);
    w.id = take(begin, used, pins * 4), w.common = take(begin, used, samples * sizeof *w.common);
    w.mark = take(begin, used, keys * 4), w.near_x = take(begin, used, parts * 4), w.gain = take(begin, used, samples * 4);
    w.p.first = take(begin, used, (samples + 1) * 4), w.p.of_sample = take(begin, used, pins * 4);
    w.p.key_first = take(begin, used, (keys + 1) * 4), w.p.of_key = take(begin, used, pins * 4);
    w.p.held = take(begin, used, keys * parts * sizeof *w.p.held), w.p.near = take(begin, used, parts * samples * 4);
    w.p.own = take(begin, used, samples * 4), w.p.part = take(begin, used, samples * 4);
    return w;
}

// Numbers the keys of several samples. The other keys cost the same in every part.
static void number_keys(Work *w, const int64_t *keys, const int64_t *offsets, int features) {
    Problem *p = &w->p;
    Slot *slot = w->slot;
    Seen *seen = w->seen;
    int32_t *id = w->id;
    int64_t mask = w->slots - 1;
    int n = p->samples, distinct = 0, shared = 0, pins = 0;
    memset(slot, 255, w->slots * sizeof *slot);
    for (int s = 0; s < n; s++)
        for (int f = 0; f < features; f++) {
            const int64_t *from = offsets + (int64_t)f * (n + 1) + s;
            for (int64_t i = from[0]; i < from[1]; i++) {
                int64_t at = mix(keys[i]) & mask;
                while (slot[at].id >= 0 && slot[at].key != keys[i]) at = (at + 1) & mask;
                if (slot[at].id < 0) {
                    seen[distinct] = (Seen){-1, 0};
                    slot[at] = (Slot){keys[i], distinct++};
                }
                int k = slot[at].id;
                id[i] = seen[k].last == s ? -1 : k; // once per sample
                if (seen[k].last != s) seen[k].last = s, seen[k].degree++;
            }
        }
    p->key_first[0] = 0;
    for (int k = 0; k < distinct; k++) {
        int renamed = seen[k].degree > 1 ? shared++ : -1;
        if (renamed >= 0) p->key_first[shared] = p->key_first[renamed] + seen[k].degree;
        // From here on ``last`` is the key's number, and ``degree`` is the index of its next sample.
        seen[k] = (Seen){renamed, renamed < 0 ? 0 : p->key_first[renamed]};
    }
    for (int s = 0; s < n; s++) {
        p->first[s] = pins;
        for (int f = 0; f < features; f++) {
            const int64_t *from = offsets + (int64_t)f * (n + 1) + s;
            for (int64_t i = from[0]; i < from[1]; i++) {
                if (id[i] < 0) continue;
                Seen *k = seen + id[i];
                if (k->last >= 0) p->of_sample[pins++] = k->last, p->of_key[k->degree++] = s;
            }
        }
    }
    p->first[n] = pins, p->keys = shared;
}

#define BLOCK 32

// NAME(values, n): the index of the first of the largest values.
#define ARGMAX(NAME, TYPE)                                                                      \
    VECTORISED static int NAME(const TYPE *values, int n) {                                     \
        TYPE most = values[0];                                                                  \
        for (int i = 1; i < n; i++) most = values[i] > most ? values[i] : most;                 \
        int at = 0;                                                                             \
        for (int found = 0; at + BLOCK <= n; at += BLOCK) {                                     \
            for (int i = 0; i < BLOCK; i++) found |= values[at + i] == most;                    \
            if (found) break;                                                                   \
        }                                                                                       \
        while (values[at] != most) at++;                                                        \
        return at;                                                                              \
    }

ARGMAX(argmax64, int64_t)
ARGMAX(argmax32, int32_t)

static void grow(Work *w, const int32_t *sizes, const int64_t *weight_of_degree) {
    Problem *p = &w->p;
    int64_t *common = w->common;
    int32_t *near = w->near_x;
    int n = p->samples;
    const int64_t taken = INT64_MIN / 2; // remains below every free sample, whatever is added to it later
    memset(p->held, 0, (int64_t)p->keys * p->parts * sizeof *p->held);
    memset(p->part, 255, n * sizeof *p->part);
    for (int m = 0; m < p->parts; m++) {
        for (int s = 0; s < n; s++) common[s] = p->part[s] < 0 ? p->first[s + 1] - p->first[s] : taken;
        for (int t = 0; t < sizes[m]; t++) {
            int best = argmax64(common, n);
            if (!t)
                for (int s = 0; s < n; s++) common[s] = p->part[s] < 0 ? 0 : taken;
            p->part[best] = m, common[best] = taken;
            for (int i = p->first[best]; i < p->first[best + 1]; i++) {
                int k = p->of_sample[i], begin = p->key_first[k], end = p->key_first[k + 1];
                Held *held = p->held + (int64_t)k * p->parts + m;
                held->which ^= best;
                if (held->count++) continue;
                int64_t weight = weight_of_degree[end - begin];
                for (int j = begin; j < end; j++) common[p->of_key[j]] += weight;
            }
        }
    }
    for (int s = 0; s < n; s++) {
        memset(near, 0, p->parts * sizeof *near);
        for (int i = p->first[s]; i < p->first[s + 1]; i++) {
            const Held *held = p->held + (int64_t)p->of_sample[i] * p->parts;
            for (int m = 0; m < p->parts; m++) near[m] += held[m].count > 0;
            near[p->part[s]] -= held[p->part[s]].count == 1;
        }
        for (int m = 0; m < p->parts; m++) p->near[(int64_t)m * n + s] = near[m];
        p->own[s] = near[p->part[s]];
    }
}

// Puts sample x into part m (by = 1) or takes it out (by = -1), and updates ``near`` of the other samples.
static void shift(Problem *p, int x, int m, int by) {
    int32_t *near = p->near + (int64_t)m * p->samples;
    if (by < 0) p->part[x] = -1;
    for (int i = p->first[x]; i < p->first[x + 1]; i++) {
        int k = p->of_sample[i];
        Held *held = p->held + (int64_t)k * p->parts + m;
        int others = held->count - (by < 0); // samples of the part, without x, that have the key
        held->count += by, held->which ^= x;
        if (others == 1) {
            int s = by < 0 ? held->which : held->which ^ x;
            near[s] += by, p->own[s] += by;
        } else if (!others) {
            for (int j = p->key_first[k]; j < p->key_first[k + 1]; j++) near[p->of_key[j]] += by;
            near[x] -= by;
        }
    }
    if (by > 0) p->part[x] = m, p->own[x] = near[x];
}

// Keys that x and y share remain in both parts after a swap, but the bound on the gain counts some of them as saved.
static int overcounted(const Problem *p, const int32_t *mark, int x, int y) {
    int over = 0;
    for (int i = p->first[y]; i < p->first[y + 1]; i++) {
        int k = p->of_sample[i];
        const Held *held = p->held + (int64_t)k * p->parts;
        if (mark[k] == x) over += (held[p->part[x]].count < 2) + (held[p->part[y]].count < 2);
    }
    return over;
}

#define FEW 8

// An upper bound on what swapping x (of part a) with each sample saves; 0 for the samples of its own part.
VECTORISED static void bounds(const Problem *p, int a, const int32_t *near_x, int32_t *gain) {
    const int32_t *near_a = p->near + (int64_t)a * p->samples, *part = p->part, *own = p->own;
    int n = p->samples;
    if (p->parts > FEW) {
        for (int y = 0; y < n; y++) gain[y] = near_a[y] - own[y] + near_x[part[y]] - near_x[a];
    } else { // gathers are slow
        for (int y = 0; y < n; y++) gain[y] = near_a[y] - own[y] - near_x[a];
        for (int m = 0; m < p->parts; m++) {
            int32_t there = near_x[m];
            for (int y = 0; y < n; y++) gain[y] += part[y] == m ? there : 0;
        }
    }
    for (int y = 0; y < n; y++) gain[y] = part[y] == a ? 0 : gain[y];
}

static int exchange(Work *w, int tries) {
    Problem *p = &w->p;
    int32_t *mark = w->mark, *near_x = w->near_x, *gain = w->gain;
    int swaps = 0;
    for (int x = 0; x < p->samples; x++) {
        int a = p->part[x], best = -1, best_gain = 0;
        for (int m = 0; m < p->parts; m++) near_x[m] = p->near[(int64_t)m * p->samples + x];
        bounds(p, a, near_x, gain);
        for (int t = 0; t < tries; t++) {
            int candidate = argmax32(gain, p->samples), bound = gain[candidate];
            if (bound <= best_gain) break;
            if (!t)
                for (int i = p->first[x]; i < p->first[x + 1]; i++) mark[p->of_sample[i]] = x;
            int exact = bound - overcounted(p, mark, x, candidate);
            if (exact > best_gain) best_gain = exact, best = candidate;
            gain[candidate] = INT32_MIN;
        }
        if (best < 0) continue;
        int b = p->part[best];
        shift(p, x, a, -1), shift(p, best, b, -1), shift(p, x, b, 1), shift(p, best, a, 1);
        swaps++;
    }
    return swaps;
}

static int64_t keys_in_parts(const Problem *p) {
    int64_t sum = 0;
    for (int64_t i = 0; i < (int64_t)p->keys * p->parts; i++) sum += p->held[i].count > 0;
    return sum;
}

// ``offsets``: [features, samples + 1], indices into ``keys``. ``weights``: [starts, samples + 1], by degree. The
// starts after the first are tried only if shared keys have ``dense`` samples or more on average. Fills ``part``
// [samples]. Returns 1 if there is not enough memory.
int cluster(const int64_t *keys, const int64_t *offsets, int features, int samples, int parts, const int32_t *sizes,
            const int64_t *weights, int starts, int dense, int passes, int tries, int32_t *part) {
    int64_t pins = offsets[(int64_t)features * (samples + 1) - 1], bytes = 0, used = 0;
    lay_out(NULL, &bytes, pins, samples, parts);
    char *memory = malloc(bytes);
    if (!memory) return 1;
    Work w = lay_out(memory, &used, pins, samples, parts);
    Problem *p = &w.p;
    number_keys(&w, keys, offsets, features);
    int64_t least = INT64_MAX;
    if (p->first[samples] < (int64_t)dense * p->keys) starts = 1;
    for (int start = 0; start < starts; start++) {
        memset(w.mark, 255, p->keys * sizeof *w.mark);
        grow(&w, sizes, weights + (int64_t)start * (samples + 1));
        for (int pass = 0; pass < passes && exchange(&w, tries); pass++) {}
        int64_t found = keys_in_parts(p);
        if (found < least) least = found, memcpy(part, p->part, samples * sizeof *part);
    }
    free(memory);
    return 0;
}
