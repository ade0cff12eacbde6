#include "llama/memory_plan.h"

#include <ggml-backend.h>
#include <llama-context.h>
#include <llama-ext.h>
#include <llama.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "base/error.h"
#include "llama/backend.h"
#include "llama/context.h"
#include "llama/context_params.h"
#include "llama/devices.h"

namespace kqview {

namespace {

// The buffer for a step's outputs; llama.cpp allocates it at the first such step.
double output_bytes(const llama_model* source, const llama_context_params& params) {
    const double n_floats = llama_vocab_n_tokens(llama_model_get_vocab(source));
    return 4.0 * params.n_outputs_max * (n_floats + llama_model_n_embd_out(source));
}

// An upper bound for any context: no model has heads wider than twice its embedding.
double largest_need_bytes(const llama_model* source, const llama_context_params& params) {
    const double n_cache_floats =
        2.0 * 2.0 * llama_model_n_layer(source) * llama_model_n_embd(source);
    const double n_score_floats = static_cast<double>(params.n_ubatch) * llama_model_n_head(source);
    return 4.0 * params.n_ctx * (n_cache_floats + n_score_floats) +
           2.0 * output_bytes(source, params);
}

// What llama.cpp plans for a context on the host (first) and on each device, including the model's
// weights on devices, but without its bookkeeping per cell. Empty if llama.cpp refuses: opening the
// real context then gives the reason.
std::vector<device_need> planned_at(model& weightless, const llama_context_params& params) {
    const auto handle = guarded("estimating a context's memory", errc::model_load,
                                "lower n_ctx, n_slots or n_gpu_layers",
                                [&] { return open_context(weightless.get(), params); });
    if (!handle) return {};
    std::vector<device_need> needs(1);
    needs.front().device = "host";
    std::vector<ggml_backend_dev_t> devices;
    for (int i = 0; i < llama_model_n_devices(weightless.get()); ++i) {
        devices.push_back(llama_model_get_device(weightless.get(), i));
        auto& need = needs.emplace_back();
        need.device = ggml_backend_dev_name(devices.back());
        ggml_backend_dev_memory(devices.back(), &need.free_bytes, &need.total_bytes);
    }
    for (const auto& [buffer_type, part] : llama_get_memory_breakdown(handle.get())) {
        const auto device = ggml_backend_buft_get_device(buffer_type);
        // Weights that a CPU has packed are its own kind, in host memory all the same.
        const bool is_host =
            ggml_backend_buft_is_host(buffer_type) ||
            (device && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU);
        const auto found = std::find(devices.begin(), devices.end(), device);
        if (!is_host && found == devices.end()) continue;
        auto& need = needs[is_host ? 0 : 1 + static_cast<std::size_t>(found - devices.begin())];
        need.model_bytes += part.model;
        need.context_bytes += part.context;
        need.compute_bytes += part.compute;
    }
    return needs;
}

// A plan costs time and memory per cell: contexts of more cells than this are put together from
// plans of smaller ones. As many cells of one slot are more than any sliding window, so that what
// is beyond grows linearly.
constexpr std::uint32_t n_planned_max = 1 << 18;
constexpr double bytes_of_cell = 64;

constexpr std::uint32_t padded(std::uint32_t n, std::uint32_t to) { return (n + to - 1) / to * to; }

// Plans contexts of one model that differ in their size.
class planner {
public:
    explicit planner(model& weightless) : weightless_(weightless) {}

    // A cache is as large as that of one slot, times the slots. Compute buffers hardly depend on
    // the slots, which share the tokens of a step: those of one slot, and what as many slots add
    // for a small step with small caches (recurrent states).
    std::vector<device_need> needs(const llama_context_params& params) {
        if (params.n_ctx <= n_planned_max) return plan(params);
        const auto n_slots = params.n_seq_max;
        auto needs = needs_of_slot(params);
        if (n_slots == 1 || needs.empty()) return needs;
        auto small = params;
        small.n_ubatch = small.n_batch = padded(std::min(params.n_ubatch, n_small_step), n_slots);
        const auto n_cells = padded(small.n_ubatch, cell_padding);
        const auto of_all = plan(resized(small, n_cells, n_slots));
        const auto of_one = plan(resized(small, n_cells, 1));
        if (of_all.size() != needs.size() || of_one.size() != needs.size()) return {};
        for (std::size_t i = 0; i < needs.size(); ++i) {
            needs[i].context_bytes *= n_slots;
            const auto all = of_all[i].compute_bytes;
            needs[i].compute_bytes += all - std::min(all, of_one[i].compute_bytes);
        }
        return needs;
    }

private:
    static constexpr std::uint32_t n_small_step = 512;

    static llama_context_params resized(llama_context_params params, std::uint32_t n_cells,
                                        std::uint32_t n_slots) {
        params.n_ctx = n_cells * n_slots;
        params.n_seq_max = n_slots;
        params.n_outputs_max = std::min(params.n_outputs_max, params.n_ubatch);
        return params;
    }

    // A context like this with one slot.
    std::vector<device_need> needs_of_slot(const llama_context_params& params) {
        const auto n_cells = params.n_ctx / params.n_seq_max;
        const auto n_planned =
            std::min(std::max(n_cells, padded(params.n_ubatch, cell_padding)), n_planned_max);
        if (n_planned < n_planned_max) return plan(resized(params, n_planned, 1));
        auto step = params;
        step.n_ubatch = step.n_batch = std::min(params.n_ubatch, n_planned_max / 2);
        auto needs = plan(resized(step, n_planned_max, 1));
        const auto half = plan(resized(step, n_planned_max / 2, 1));
        if (half.size() != needs.size()) return {};
        const double n_steps = (static_cast<double>(n_cells) - n_planned_max) / (n_planned_max / 2);
        const auto extend = [n_steps](std::size_t& whole, std::size_t of_half) {
            if (whole <= of_half) return;
            whole += static_cast<std::size_t>(n_steps * static_cast<double>(whole - of_half));
        };
        for (std::size_t i = 0; i < needs.size(); ++i) {
            extend(needs[i].context_bytes, half[i].context_bytes);
            extend(needs[i].compute_bytes, half[i].compute_bytes);
            needs[i].compute_bytes *= (params.n_ubatch + step.n_ubatch - 1) / step.n_ubatch;
        }
        return needs;
    }

    const std::vector<device_need>& plan(const llama_context_params& params) {
        const auto [found, is_new] =
            plans_.try_emplace({params.n_ctx, params.n_seq_max, params.n_ubatch});
        if (is_new) found->second = planned_at(weightless_, params);
        return found->second;
    }

    model& weightless_;
    // By cells, slots and tokens of a step.
    std::map<std::array<std::uint32_t, 3>, std::vector<device_need>> plans_;
};

std::vector<device_need> planned(model& weightless, const llama_context_params& params) {
    return planner(weightless).needs(params);
}

// Of a context on the host; `needs`: what planner::needs gives.
double host_need_bytes(const llama_model* source, const llama_context_params& params,
                       std::span<const device_need> needs) {
    double n_bytes = bytes_of_cell * params.n_ctx + output_bytes(source, params);
    if (!needs.empty()) {
        n_bytes += static_cast<double>(needs.front().context_bytes + needs.front().compute_bytes);
    }
    return n_bytes;
}

model_options weightless_options(const model_options& options) {
    auto weightless = options;
    weightless.no_alloc = true;
    weightless.progress = nullptr;
    return weightless;
}

}  // namespace

void check_memory(const model& source, const context_options& options) {
    const auto params = params_of(source, options);
    const auto limit_bytes = static_cast<double>(options.host_memory_bytes);
    if (options.host_memory_bytes == 0 ||
        largest_need_bytes(source.get(), params) < limit_bytes / 4)
        return;
    model weightless(weightless_options(source.options()));
    const double n_bytes = host_need_bytes(source.get(), params, planned(weightless, params));
    if (n_bytes <= limit_bytes) return;
    throw error(errc::out_of_memory, "a context of ", n_ctx_of(source, options), " tokens x ",
                options.n_slots, " slots needs ", size_text(n_bytes),
                ", but this process may use only ", size_text(limit_bytes),
                "; lower n_ctx, n_slots or n_ubatch, or choose a smaller kv_type");
}

// ---- a context by default

namespace {

// What the model was trained with, as far as llama.cpp can hold as many cells.
int largest_n_ctx(const model& source, const context_options& options) {
    auto trained = options;
    trained.n_ctx = 0;
    return std::min(n_ctx_of(source, trained), (1 << 30) / std::max(1, options.n_slots));
}

// A smaller one is nobody's idea of a default: the context then fails as one that was asked for.
int least_n_ctx(int largest) { return std::min(largest, 4096); }

// Where these needs have no room, as context_fit says it; nothing if they have.
std::optional<context_fit> shortage(const model& source, const llama_context_params& params,
                                    std::span<const device_need> needs, double free_bytes) {
    const auto compared = [](const std::string& where, double needed, double allowed) {
        std::optional<context_fit> found;
        if (needed <= allowed) return found;
        found = context_fit{.limited_by = where,
                            .needed_bytes = static_cast<std::size_t>(needed),
                            .allowed_bytes = static_cast<std::size_t>(std::max(0.0, allowed))};
        return found;
    };
    // What a loaded model has on devices is no longer free there.
    const bool is_loaded = !source.options().no_alloc;
    for (std::size_t i = 1; i < needs.size(); ++i) {
        const auto& need = needs[i];
        if (need.total_bytes == 0) continue;
        const auto weights = is_loaded ? 0.0 : static_cast<double>(need.model_bytes);
        const auto needed = static_cast<double>(need.context_bytes + need.compute_bytes);
        const auto free = static_cast<double>(need.free_bytes);
        if (auto found = compared(need.device, needed, 0.9 * (free - weights))) return found;
    }
    if (free_bytes == 0 || needs.empty()) return std::nullopt;
    const auto weights = static_cast<double>(needs.front().model_bytes);
    return compared("host", host_need_bytes(source.get(), params, needs),
                    0.5 * (free_bytes - weights));
}

}  // namespace

context_fit fit_context(model& source, const context_options& options) {
    const int largest = largest_n_ctx(source, options);
    const int least = least_n_ctx(largest);
    context_fit fit{.n_ctx = largest, .n_ctx_train = largest};
    if (largest == least) return fit;
    auto tried = options;
    tried.n_ctx = largest;
    const auto free_bytes = static_cast<double>(options.free_memory_bytes);
    const double most_bytes = static_cast<double>(llama_model_size(source.get())) +
                              2.0 * largest_need_bytes(source.get(), params_of(source, tried));
    const bool is_on_host = llama_model_n_devices(source.get()) == 0;
    if (is_on_host && (free_bytes == 0 || most_bytes < free_bytes)) return fit;

    std::optional<model> weightless;
    if (!source.options().no_alloc) weightless.emplace(weightless_options(source.options()));
    planner plans(weightless ? *weightless : source);
    while (tried.n_ctx > least) {
        const auto params = params_of(source, tried);
        const auto found = shortage(source, params, plans.needs(params), free_bytes);
        if (!found) break;
        fit = *found;
        const auto smaller =
            static_cast<int>(std::bit_floor(static_cast<unsigned>(tried.n_ctx - 1)));
        tried.n_ctx = std::max(least, smaller);
    }
    fit.n_ctx = tried.n_ctx;
    fit.n_ctx_train = largest;
    return fit;
}

void check_device_memory(const model_options& wanted, const context_options& options) {
    start_llama();
    if (local_gpus().empty()) return;
    model weightless(weightless_options(wanted));
    auto least = options;
    if (least.n_ctx == 0) least.n_ctx = least_n_ctx(largest_n_ctx(weightless, options));
    auto needs = planned(weightless, params_of(weightless, least));
    if (needs.empty()) return;
    needs.erase(needs.begin());  // the host: see check_memory
    check_device_needs(needs, llama_model_n_layer(weightless.get()) + 1);
}

std::vector<device_need> check_opening(const model_options& wanted, const context_options& given) {
    start_llama();
    const auto weightless = std::make_shared<model>(weightless_options(wanted));
    auto options = given;
    if (options.n_ctx == 0) options.n_ctx = fit_context(*weightless, options).n_ctx;
    check_memory(*weightless, options);
    check_device_memory(wanted, options);
    auto probed = options;
    probed.n_ctx =
        std::min(n_ctx_of(*weightless, options), static_cast<int>(n_planned_max) / options.n_slots);
    const context probe(weightless, probed);
    const auto params = params_of(*weightless, options);
    auto needs = planned(*weightless, params);
    // Of the same weights as the model's own context.
    if (options.predicts) std::ranges::for_each(needs, [](auto& one) { one.model_bytes = 0; });
    if (!needs.empty()) {
        needs.front().context_bytes +=
            static_cast<std::size_t>(host_need_bytes(weightless->get(), params, {}));
    }
    return needs;
}

}  // namespace kqview
