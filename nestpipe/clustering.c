// Key-centric sample clustering, sequential and in integers: clustering.py states the objective and the method,
// and holds the same algorithm in numpy; both give the same parts.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int samples, parts, keys;
    int32_t *first, *of_sample;  // [samples + 1], [pins]: the shared keys of each sample
    int32_t *key_first, *of_key; // [keys + 1], [pins]: the samples of each key
    uint16_t *count;             // [keys, parts]: samples of a part that hold a key
    int32_t *near;               // [samples, parts]: keys of a sample that *other* samples of a part hold
    int32_t *part;               // [samples]: -1 while it has none
} Problem;

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
    return x ^ (x >> 32);
}

// Numbers the keys that several samples hold. The others cost the same wherever their sample goes.
static int number_keys(Problem *p, const int64_t *keys, const int64_t *offsets, int features) {
    int n = p->samples;
    int64_t total = offsets[(int64_t)features * (n + 1) - 1], slots = 16;
    while (slots < 2 * total) slots *= 2;
    int64_t *slot_key = malloc(slots * sizeof *slot_key);
    int32_t *slot_id = malloc(slots * sizeof *slot_id), *id = malloc((total + 1) * sizeof *id);
    int32_t *last = malloc((total + 1) * sizeof *last), *degree = malloc((total + 1) * sizeof *degree);
    int failed = !slot_key || !slot_id || !id || !last || !degree;
    if (!failed) {
        memset(slot_id, 255, slots * sizeof *slot_id);
        int distinct = 0, shared = 0, pins = 0;
        for (int s = 0; s < n; s++)
            for (int f = 0; f < features; f++) {
                const int64_t *from = offsets + (int64_t)f * (n + 1) + s;
                for (int64_t i = from[0]; i < from[1]; i++) {
                    int64_t at = mix(keys[i]) & (slots - 1);
                    while (slot_id[at] >= 0 && slot_key[at] != keys[i]) at = (at + 1) & (slots - 1);
                    if (slot_id[at] < 0) {
                        slot_id[at] = distinct, slot_key[at] = keys[i];
                        last[distinct] = -1, degree[distinct++] = 0;
                    }
                    int k = slot_id[at];
                    id[i] = last[k] == s ? -1 : k; // once per sample
                    if (last[k] != s) last[k] = s, degree[k]++;
                }
            }
        p->key_first[0] = 0;
        for (int k = 0; k < distinct; k++) {
            int renamed = degree[k] > 1 ? shared++ : -1;
            if (renamed >= 0) {
                p->key_first[shared] = p->key_first[renamed] + degree[k];
                degree[renamed] = p->key_first[renamed]; // from here on: where the key's next sample goes
            }
            last[k] = renamed;
        }
        for (int s = 0; s < n; s++) {
            p->first[s] = pins;
            for (int f = 0; f < features; f++) {
                const int64_t *from = offsets + (int64_t)f * (n + 1) + s;
                for (int64_t i = from[0]; i < from[1]; i++)
                    if (id[i] >= 0 && last[id[i]] >= 0) {
                        p->of_sample[pins++] = last[id[i]];
                        p->of_key[degree[last[id[i]]]++] = s;
                    }
            }
        }
        p->first[n] = pins, p->keys = shared;
    }
    free(slot_key), free(slot_id), free(id), free(last), free(degree);
    return failed;
}

static void grow(Problem *p, const int32_t *sizes, const int64_t *weight_of_degree, int64_t *common) {
    memset(p->count, 0, (int64_t)p->keys * p->parts * sizeof *p->count);
    memset(p->near, 0, (int64_t)p->samples * p->parts * sizeof *p->near);
    memset(p->part, 255, p->samples * sizeof *p->part);
    for (int m = 0; m < p->parts; m++) {
        memset(common, 0, p->samples * sizeof *common);
        for (int t = 0; t < sizes[m]; t++) {
            int best = -1;
            int64_t most = -1;
            for (int s = 0; s < p->samples; s++) {
                if (p->part[s] >= 0) continue;
                int64_t score = t ? common[s] : p->first[s + 1] - p->first[s];
                if (score > most) most = score, best = s;
            }
            p->part[best] = m;
            for (int i = p->first[best]; i < p->first[best + 1]; i++) {
                int k = p->of_sample[i], begin = p->key_first[k], end = p->key_first[k + 1];
                if (p->count[(int64_t)k * p->parts + m]++) continue;
                for (int j = begin; j < end; j++) common[p->of_key[j]] += weight_of_degree[end - begin];
            }
        }
    }
    for (int s = 0; s < p->samples; s++) {
        int32_t *near = p->near + (int64_t)s * p->parts;
        for (int i = p->first[s]; i < p->first[s + 1]; i++) {
            const uint16_t *count = p->count + (int64_t)p->of_sample[i] * p->parts;
            for (int m = 0; m < p->parts; m++) near[m] += count[m] > 0;
            near[p->part[s]] -= count[p->part[s]] == 1;
        }
    }
}

// Puts sample x into part m (by = 1) or takes it out (by = -1); ``near`` of the others follows.
static void shift(Problem *p, int x, int m, int by) {
    if (by < 0) p->part[x] = -1;
    for (int i = p->first[x]; i < p->first[x + 1]; i++) {
        int k = p->of_sample[i];
        uint16_t *count = p->count + (int64_t)k * p->parts + m;
        *count += by;
        int others = *count - (by > 0); // those beside x, who alone would notice
        if (others > 1) continue;
        for (int j = p->key_first[k]; j < p->key_first[k + 1]; j++) {
            int s = p->of_key[j];
            if (s != x && (others == 0 || p->part[s] == m)) p->near[(int64_t)s * p->parts + m] += by;
        }
    }
    if (by > 0) p->part[x] = m;
}

// Keys that x and y share stay in both parts when they are exchanged; the bound on the gain counts some as won.
static int overcounted(const Problem *p, const int32_t *mark, int x, int y) {
    int over = 0;
    for (int i = p->first[y]; i < p->first[y + 1]; i++) {
        int k = p->of_sample[i];
        const uint16_t *count = p->count + (int64_t)k * p->parts;
        if (mark[k] == x) over += (count[p->part[x]] < 2) + (count[p->part[y]] < 2);
    }
    return over;
}

static int exchange(Problem *p, int32_t *mark, int tries) {
    int swaps = 0;
    for (int x = 0; x < p->samples; x++) {
        const int32_t *near_x = p->near + (int64_t)x * p->parts;
        int a = p->part[x], best = -1, best_gain = 0, below = INT32_MAX, after = -1;
        for (int t = 0; t < tries; t++) {
            int candidate = -1, bound = best_gain;
            for (int y = 0; y < p->samples; y++) {
                int b = p->part[y];
                const int32_t *near_y = p->near + (int64_t)y * p->parts;
                int gain = near_x[b] - near_x[a] + near_y[a] - near_y[b];
                if (b != a && gain > bound && (gain < below || (gain == below && y > after))) bound = gain, candidate = y;
            }
            if (candidate < 0) break;
            if (!t)
                for (int i = p->first[x]; i < p->first[x + 1]; i++) mark[p->of_sample[i]] = x;
            int gain = bound - overcounted(p, mark, x, candidate);
            if (gain > best_gain) best_gain = gain, best = candidate;
            below = bound, after = candidate;
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
    for (int64_t i = 0; i < (int64_t)p->keys * p->parts; i++) sum += p->count[i] > 0;
    return sum;
}

// ``offsets``: [features, samples + 1] into ``keys``; ``weights``: [starts, samples + 1], by degree; the starts after
// the first are made where shared keys have ``dense`` samples or more on average. Fills ``part`` [samples].
// Returns 1 where memory is lacking.
int cluster(const int64_t *keys, const int64_t *offsets, int features, int samples, int parts, const int32_t *sizes,
            const int64_t *weights, int starts, int dense, int passes, int tries, int32_t *part) {
    int64_t total = offsets[(int64_t)features * (samples + 1) - 1];
    Problem p = {.samples = samples, .parts = parts};
    p.part = malloc((samples + 1) * 4);
    p.first = malloc((samples + 1) * 4), p.of_sample = malloc((total + 1) * 4);
    p.key_first = malloc((total + 1) * 4), p.of_key = malloc((total + 1) * 4);
    int64_t *common = malloc((samples + 1) * sizeof *common);
    int32_t *mark = NULL;
    int failed = !p.part || !p.first || !p.of_sample || !p.key_first || !p.of_key || !common ||
                 number_keys(&p, keys, offsets, features);
    if (!failed) {
        p.count = calloc((int64_t)p.keys * parts + 1, 2), p.near = calloc((int64_t)samples * parts + 1, 4);
        mark = malloc((p.keys + 1) * 4);
        failed = !p.count || !p.near || !mark;
    }
    if (!failed) {
        int64_t least = INT64_MAX;
        if (p.first[samples] < (int64_t)dense * p.keys) starts = 1;
        for (int start = 0; start < starts; start++) {
            memset(mark, 255, (p.keys + 1) * 4);
            grow(&p, sizes, weights + (int64_t)start * (samples + 1), common);
            for (int pass = 0; pass < passes && exchange(&p, mark, tries); pass++) {}
            int64_t found = keys_in_parts(&p);
            if (found < least) least = found, memcpy(part, p.part, samples * sizeof *part);
        }
    }
    free(p.first), free(p.of_sample), free(p.key_first), free(p.of_key), free(p.count), free(p.near);
    free(common), free(mark), free(p.part);
    return failed;
}
