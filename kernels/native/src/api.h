// The C interface. cffi reads everything between the two marks (kernels/native/library.py).
#pragma once

#include <stdint.h>

#define KVR_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// cffi begins
typedef struct kvr_linear kvr_linear;
typedef struct kvr_model kvr_model;

typedef struct {
    int32_t layers, hidden, inner, heads, kv_heads, head_dim, vocab, positions;
    int32_t kv_format;  // 0 bfloat16, 1 int8, 2 int4
    float norm_eps;
} kvr_shape;

typedef struct {
    float inv_temperature;
    int32_t top_k;
    double top_p, min_p;
    uint64_t hash;
    int32_t greedy;
    const uint32_t* allowed;  // a bit an id, lowest first; null: all. Ids without their bit score -inf
} kvr_sampling;

// Rows of one pass. Span s has `span_rows[s]` rows from position `span_start[s]` on, and its pages begin at
// `pages[span_pages[s]]`. `logit_rows`: [num_logits], ascending; `logits`: [num_logits, vocab] or null. Draw i is from
// the logits of number `draw_from[i]`, its id goes to `sampled[i]` and to `status[i]` 0, or 1 where they are not finite.
// `finite`: [rows] or null. Only the first `own_threads` go on
// once `*revoked` is not 0 (or null: all do). Nothing is drawn before `*allowed_known` is not 0 (or null: at once): until
// then somebody else writes what the draws allow, and says so with `kvr_tell`.
typedef struct {
    int32_t rows, spans, num_logits, num_draws, threads, page_tokens;
    const int32_t *token_ids, *span_start, *span_rows, *span_pages, *pages, *logit_rows, *draw_from;
    uint8_t* pool;
    float* logits;
    const kvr_sampling* draws;
    uint32_t* sampled;
    uint8_t *status, *finite;
    const int32_t* revoked;
    int32_t own_threads;
    const int32_t* allowed_known;
} kvr_pass;

const char* kvr_isa(void);
int kvr_use(const char* isa);

kvr_linear* kvr_linear_new(int32_t outputs, int32_t inputs);
void kvr_linear_free(kvr_linear* linear);
int kvr_linear_append(kvr_linear* linear, int32_t format, const uint8_t* blocks, const int64_t* order, int32_t rows);
int kvr_linear_bias(kvr_linear* linear, const float* bias);
int64_t kvr_linear_bytes(const kvr_linear* linear);
uint8_t* kvr_linear_quants(kvr_linear* linear, int32_t part);

// `threads` with the caller; those from `own` on run on the `num_lent` cores of `lent`.
kvr_model* kvr_model_new(const kvr_shape* shape, int32_t threads, int32_t own, const int32_t* lent, int32_t num_lent);
void kvr_model_free(kvr_model* model);
int kvr_model_layer(kvr_model* model, int32_t number, const float* attention_norm, const float* mlp_norm,
                    const float* q_norm, const float* k_norm, const kvr_linear* qkv, const kvr_linear* out,
                    const kvr_linear* gate_up, const kvr_linear* down);
void kvr_model_ends(kvr_model* model, const kvr_linear* embedding, const float* norm, const kvr_linear* head,
                    const float* cos, const float* sin);
int kvr_model_run(kvr_model* model, const kvr_pass* pass);
// In the last pass, of all threads together: how long they waited for others beyond what a phase may take.
int64_t kvr_model_waited_ns(const kvr_model* model);
// What the caller wrote before is seen by who finds `*flag` not 0.
void kvr_tell(int32_t* flag);

// Chooses one id. `scratch` of `kvr_sample_scratch_bytes(vocab)`, one a thread. 0 ok, 1 not finite.
int64_t kvr_sample_scratch_bytes(int64_t vocab);
int kvr_sample(const float* logits, int64_t vocab, const kvr_sampling* params, uint32_t* id, void* scratch);

void kvr_exp(const float* x, float* y, int64_t count);
void kvr_rms_norm(const float* x, const float* weight, float eps, int32_t rows, int32_t inputs, float* y);
void kvr_quantise(const float* x, int32_t rows, int32_t inputs, int8_t* q, float* scale, float* scaled_sum, int32_t* sum);
void kvr_linear_run(const kvr_linear* linear, const float* x, int32_t rows, float* y);
void kvr_linear_row(const kvr_linear* linear, int32_t row, float* out);
void kvr_silu_gate(const float* gate_up, int32_t rows, int32_t inner, float* y);
void kvr_rotate(float* x, int32_t rows, int32_t heads, int32_t dim, const float* cos, const float* sin);
void kvr_append(const float* x, int32_t kv_format, int32_t kv_heads, int32_t page_tokens, int32_t dim, uint8_t* side,
                int32_t token);
int kvr_attend(const kvr_shape* shape, const kvr_pass* pass, int32_t layer, const float* q, float* out);
// cffi ends

#ifdef __cplusplus
}
#endif
