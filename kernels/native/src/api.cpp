// The C interface around the classes.
#if defined(__x86_64__)
#include "cpu.h"
#endif
#include "api.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "kernels.h"
#include "model.h"
#include "sampler.h"

struct kvr_linear : kvr::Linear {
    using Linear::Linear;
};
struct kvr_model : kvr::Model {
    using Model::Model;
};

namespace kvr {

namespace {

const Kernels* named(const char* name) {
#if defined(__x86_64__)
    const Cpu machine = cpu();
    if (machine.avx512 && (name == nullptr || std::strcmp(name, "avx512") == 0)) return &kernels_avx512;
    if (machine.avx2 && (name == nullptr || std::strcmp(name, "avx2") == 0)) return &kernels_avx2;
#endif
    return name == nullptr || std::strcmp(name, "portable") == 0 ? &kernels_portable : nullptr;
}

std::atomic<const Kernels*> in_use{nullptr};

}  // namespace

const Kernels& kernels() {
    const Kernels* table = in_use.load(std::memory_order_relaxed);
    if (table == nullptr) {
        const char* wanted = std::getenv("KVRELAY_ISA");
        table = wanted && *wanted ? named(wanted) : nullptr;
        if (table == nullptr) table = named(nullptr);
        in_use.store(table, std::memory_order_relaxed);
    }
    return *table;
}

}  // namespace kvr

using kvr::kernels;

namespace {

/// Rows of float32 as the products want them.
struct Inputs {
    Inputs(const float* from, int32_t rows, int32_t inputs)
        : q(static_cast<size_t>(kvr::whole_rows(rows) * inputs)), scale(q.size() / kvr::kGroup), scaled_sum(scale.size()),
          sum(scale.size()), x{q.data(), scale.data(), scaled_sum.data(), sum.data(), inputs} {
        for (int64_t r = 0; r < rows; ++r) kernels().quantise(from + r * inputs, x, r);
    }
    std::vector<int8_t> q;
    std::vector<float> scale, scaled_sum;
    std::vector<int32_t> sum;
    kvr::Activations x;
};

}  // namespace

extern "C" {

KVR_API const char* kvr_isa(void) { return kernels().name; }

KVR_API int kvr_use(const char* isa) {
    const kvr::Kernels* table = kvr::named(isa);
    if (table) kvr::in_use.store(table);
    return table ? 0 : -1;
}

KVR_API kvr_linear* kvr_linear_new(int32_t outputs, int32_t inputs) { return new (std::nothrow) kvr_linear(outputs, inputs); }

KVR_API void kvr_linear_free(kvr_linear* linear) { delete linear; }

KVR_API int kvr_linear_append(kvr_linear* linear, int32_t format, const uint8_t* blocks, const int64_t* order,
                              int32_t rows) {
    return linear->append(static_cast<kvr::Format>(format), blocks, order, rows) ? 0 : -1;
}

KVR_API int kvr_linear_bias(kvr_linear* linear, const float* bias) {
    if (!linear->bias.reserve(static_cast<int64_t>(linear->num_tiles()) * kvr::kTile)) return -1;
    std::memcpy(linear->bias.get(), bias, sizeof(float) * static_cast<size_t>(linear->outputs));
    return 0;
}

KVR_API int64_t kvr_linear_bytes(const kvr_linear* linear) {
    int64_t bytes = 0;
    for (int i = 0; i < linear->num_parts; ++i) bytes += linear->parts[i].quants.size() + 2 * linear->parts[i].scales.size();
    return bytes;
}

KVR_API uint8_t* kvr_linear_quants(kvr_linear* linear, int32_t part) { return linear->parts[part].quants.get(); }

KVR_API kvr_model* kvr_model_new(const kvr_shape* shape, int32_t threads, int32_t own, const int32_t* lent, int32_t num_lent) {
    return new (std::nothrow) kvr_model(*shape, threads, own, std::vector<int32_t>(lent, lent + num_lent));
}

KVR_API void kvr_model_free(kvr_model* model) { delete model; }

KVR_API int kvr_model_layer(kvr_model* model, int32_t number, const float* attention_norm, const float* mlp_norm,
                            const float* q_norm, const float* k_norm, const kvr_linear* qkv, const kvr_linear* out,
                            const kvr_linear* gate_up, const kvr_linear* down) {
    if (number < 0 || number >= model->shape.layers) return -1;
    model->layers[static_cast<size_t>(number)] = {attention_norm, mlp_norm, q_norm, k_norm, qkv, out, gate_up, down};
    return 0;
}

KVR_API void kvr_model_ends(kvr_model* model, const kvr_linear* embedding, const float* norm, const kvr_linear* head,
                            const float* cos, const float* sin) {
    model->embedding = embedding;
    model->norm = norm;
    model->head = head;
    model->cos = cos;
    model->sin = sin;
}

KVR_API int kvr_model_run(kvr_model* model, const kvr_pass* pass) { return model->run(*pass); }

KVR_API int64_t kvr_model_waited_ns(const kvr_model* model) { return model->waited_ns(); }

KVR_API void kvr_tell(int32_t* flag) { __atomic_store_n(flag, 1, __ATOMIC_RELEASE); }

KVR_API int64_t kvr_sample_scratch_bytes(int64_t vocab) { return kvr::sample_scratch_bytes(vocab); }

KVR_API int kvr_sample(const float* logits, int64_t vocab, const kvr_sampling* params, uint32_t* id, void* scratch) {
    return kvr::sample(logits, vocab, *params, id, scratch);
}

KVR_API void kvr_exp(const float* x, float* y, int64_t count) { kernels().exp(x, y, count); }

KVR_API void kvr_rms_norm(const float* x, const float* weight, float eps, int32_t rows, int32_t inputs, float* y) {
    for (int64_t r = 0; r < rows; ++r) kernels().rms_norm(x + r * inputs, weight, eps, inputs, y + r * inputs);
}

KVR_API void kvr_quantise(const float* x, int32_t rows, int32_t inputs, int8_t* q, float* scale, float* scaled_sum,
                          int32_t* sum) {
    Inputs made(x, rows, inputs);
    for (int64_t r = 0; r < rows; ++r)
        for (int32_t g = 0; g < inputs / kvr::kGroup; ++g) {
            const int64_t from = made.x.at(r, g), to = r * (inputs / kvr::kGroup) + g;
            std::memcpy(q + to * kvr::kGroup, made.x.q + from * kvr::kGroup, kvr::kGroup);
            scale[to] = made.x.scale[from];
            scaled_sum[to] = made.x.scaled_sum[from];
            sum[to] = made.x.sum[from];
        }
}

KVR_API void kvr_linear_run(const kvr_linear* linear, const float* x, int32_t rows, float* y) {
    const Inputs made(x, rows, linear->inputs);
    kernels().linear(*linear, 0, linear->num_tiles(), made.x, 0, rows, y, linear->outputs, false);
}

KVR_API void kvr_linear_row(const kvr_linear* linear, int32_t row, float* out) { linear->row(row, out); }

KVR_API void kvr_silu_gate(const float* gate_up, int32_t rows, int32_t inner, float* y) {
    for (int64_t r = 0; r < rows; ++r)
        kernels().silu_gate(gate_up + 2 * r * inner, gate_up + (2 * r + 1) * inner, inner, y + r * inner);
}

KVR_API void kvr_rotate(float* x, int32_t rows, int32_t heads, int32_t dim, const float* cos, const float* sin) {
    for (int64_t r = 0; r < rows; ++r) kernels().rotate(x + r * heads * dim, heads, dim, cos + r * dim, sin + r * dim);
}

KVR_API void kvr_append(const float* x, int32_t kv_format, int32_t kv_heads, int32_t page_tokens, int32_t dim,
                        uint8_t* side, int32_t token) {
    kernels().append(x, {static_cast<kvr::KvFormat>(kv_format), kv_heads, page_tokens, dim}, side, token);
}

KVR_API int kvr_attend(const kvr_shape* shape, const kvr_pass* pass, int32_t layer, const float* q, float* out) {
    kvr::Model model(*shape, pass->threads, pass->threads, {});
    return model.attend_only(*pass, layer, q, out);
}

}  // extern "C"
