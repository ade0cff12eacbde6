#include "tap/device/device_nodes.h"

#include <ggml-alloc.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace kqview {

namespace {

const ggml_tensor* owner_of(const ggml_tensor* tensor) {
    return tensor->view_src ? tensor->view_src : tensor;
}

// The buffer that holds a tensor's data or, if the tensor is computed, the data of its weights.
ggml_backend_buffer_t buffer_behind(const ggml_tensor* tensor, int depth) {
    if (const auto buffer = owner_of(tensor)->buffer) return buffer;
    if (depth == 0) return nullptr;
    for (const auto* const source : tensor->src) {
        if (!source || source == tensor) continue;
        if (const auto buffer = buffer_behind(source, depth - 1)) return buffer;
    }
    return nullptr;
}

constexpr std::int64_t n_wide_head = 64;
constexpr std::int64_t n_block_cells = 512;
constexpr std::int64_t largest_grid = 65535;  // of CUDA and Vulkan, in the second dimension

bool is_view(const ggml_tensor* node) {
    return node->op == GGML_OP_VIEW || node->op == GGML_OP_PERMUTE || node->op == GGML_OP_RESHAPE;
}

// CUDA's kernel for F16 keys and one query takes any head size, but at most 512 cells, if there is
// more than one KV head or stream. For more cells the next kernel wants a multiple of 64, and what
// is left is cuBLAS, for which all keys of the layer become F32 in each step (ggml_cuda_mul_mat,
// ggml_cuda_should_use_mmvf, ggml_cuda_should_use_mmf). On AMD's GPUs ("ROCm" and not "CUDA") the
// first kernel takes any number of cells.
bool needs_blocks(const attention_site& site, int n_rows, int n_stream, ggml_backend_dev_t device) {
    const auto* const k = site.k;
    const bool is_half = k->type == GGML_TYPE_F16 || k->type == GGML_TYPE_BF16;
    return n_rows == 1 && is_half && k->ne[0] % n_wide_head != 0 && k->ne[0] % 2 == 0 &&
           k->ne[1] > n_block_cells && k->ne[1] % (n_block_cells / 2) == 0 && k->ne[2] > 1 &&
           n_stream == 1 && k->nb[0] == ggml_type_size(k->type) && is_cuda(device);
}

// Fails unless a device can compute the rows of this attention.
void check_support(const attention_site& site, row_kind kind, ggml_backend_dev_t device) {
    const auto* const where = ggml_backend_dev_name(device);
    const bool is_sparse = site.gathered || site.n_extra_cells > 0 || site.has_made_mask ||
                           site.mask_strides.head != 0 ||
                           (site.softmax && site.n_cells != site.softmax->ne[0]);
    if (is_sparse) {
        refuse_capture("sparse attention of layer ", site.il, " is on ", where,
                       "; keep the model on the CPU (n_gpu_layers=0)");
    }
    if (site.max_bias != 0.0f && kind != row_kind::probs) {
        refuse_capture("layer ", site.il, " is on ", where,
                       " and has ALiBi, only probs can be captured there; capture probs or keep "
                       "the model on the CPU (n_gpu_layers=0)");
    }
}

}  // namespace

bool is_cuda(ggml_backend_dev_t device) {
    const auto registry = ggml_backend_dev_backend_reg(device);
    return registry && std::string_view(ggml_backend_reg_name(registry)) == "CUDA";
}

int n_heads_reduced(const device_want& want, const attention_site& site) {
    return want.heads.empty() ? site.n_head : static_cast<int>(want.heads.size());
}

ggml_backend_dev_t device_of(const ggml_tensor* keys) {
    constexpr int n_steps_back = 12;
    const auto buffer = buffer_behind(keys, n_steps_back);
    if (!buffer || ggml_backend_buffer_is_host(buffer)) return nullptr;
    const auto device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer));
    // ggml does not count weights that the CPU keeps in its own layout as host memory.
    if (!device || ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) return nullptr;
    return device;
}

std::vector<ggml_tensor*> device_node_builder::take_nodes() { return std::exchange(nodes_, {}); }

ggml_tensor* device_node_builder::add(ggml_tensor* node) {
    nodes_.push_back(node);
    if (is_view(node) || ggml_backend_dev_supports_op(device_, node)) return node;
    // ggml-vulkan multiplies no quantised matrix whose rows are apart, as a head's keys are.
    const auto* const keys = node->src[0];
    const auto remedy = keys && ggml_is_quantized(keys->type)
                            ? text_of(" with keys of type ", ggml_type_name(keys->type),
                                      "; choose kv_type f16, or n_gpu_layers 0")
                            : "";
    refuse_capture(ggml_backend_dev_name(device_), " cannot compute ", ggml_op_name(node->op),
                   " of this model's attention", remedy);
}

// What ggml calls contiguous may have any stride in a dimension of one element, as the product of
// one query has with latent attention (MLA); ggml_scale aborts there.
ggml_tensor* device_node_builder::contiguous(ggml_tensor* node) {
    std::size_t stride = ggml_type_size(node->type);
    bool is_packed = true;
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        is_packed = is_packed && node->nb[i] == stride;
        stride *= static_cast<std::size_t>(node->ne[i]);
    }
    return is_packed ? node : add(ggml_cont(tensors_, node));
}

// What has one stream is shared by all.
slot_range device_node_builder::streams_in(const ggml_tensor* all) const {
    const slot_range whole{0, static_cast<int>(all->ne[3])};
    return whole.count == 1 ? whole : common_of(whole, streams_);
}

ggml_tensor* device_node_builder::queries(ggml_tensor* all, int first, int n_rows,
                                          const slot_range& streams) {
    if (all->ne[1] == n_rows && all->ne[3] == streams.count) return all;
    const auto offset = static_cast<std::size_t>(first) * all->nb[1] +
                        static_cast<std::size_t>(streams.first) * all->nb[3];
    return add(ggml_view_4d(tensors_, all, all->ne[0], n_rows, all->ne[2], streams.count,
                            all->nb[1], all->nb[2], all->nb[3], offset));
}

ggml_tensor* device_node_builder::last_queries(ggml_tensor* all, int n_rows) {
    return queries(all, static_cast<int>(all->ne[1]) - n_rows, n_rows, streams_in(all));
}

// F32, because some devices cannot add an F16 mask to F32 products. Shared by all layers with one
// mask.
ggml_tensor* device_node_builder::mask_of(const attention_site& site, int n_rows) {
    if (!site.mask) return nullptr;
    auto& known = masks_[{site.mask, n_rows}];
    if (known) return known;
    auto* const mask = site.mask;
    // llama.cpp may pad the queries of a mask.
    auto* const rows = queries(mask, site.n_queries() - n_rows, n_rows, streams_in(mask));
    known = add(mask->type == GGML_TYPE_F32 ? ggml_cont(tensors_, rows)
                                            : ggml_cast(tensors_, rows, GGML_TYPE_F32));
    return known;
}

// For a softmax, which takes llama.cpp's own mask where that begins with the wanted queries.
ggml_tensor* device_node_builder::softmax_mask_of(const attention_site& site, int n_rows) {
    if (!site.mask || n_rows != site.n_queries()) return mask_of(site, n_rows);
    auto& known = narrowed_masks_[site.mask];
    if (!known) known = last_queries(site.mask, static_cast<int>(site.mask->ne[1]));
    return known;
}

// The same product of one stream, with the cells in blocks: K as ne=[n_embd_head, n_block_cells,
// n_blocks, n_head_kv], and for each block the same query, at a stride of 0. Nothing is copied, and
// the result has the layout of the product.
ggml_tensor* device_node_builder::product_by_blocks(const attention_site& site) {
    auto* const k = site.k;
    auto* const q = site.q;
    const auto n_cells = k->ne[1] % n_block_cells == 0 ? n_block_cells : n_block_cells / 2;
    const auto n_blocks = k->ne[1] / n_cells;
    const auto stream_of = [this](const ggml_tensor* all) {
        return static_cast<std::size_t>(streams_in(all).first) * all->nb[3];
    };
    auto* const blocks =
        add(ggml_view_4d(tensors_, k, k->ne[0], n_cells, n_blocks, k->ne[2], k->nb[1],
                         static_cast<std::size_t>(n_cells) * k->nb[1], k->nb[2], stream_of(k)));
    auto* const last =
        add(ggml_view_4d(tensors_, q, q->ne[0], 1, 1, q->ne[2], q->nb[1], q->nb[2], q->nb[2],
                         static_cast<std::size_t>(q->ne[1] - 1) * q->nb[1] + stream_of(q)));
    last->ne[2] = n_blocks;  // ggml_view_4d takes no view that is larger than its source
    last->nb[2] = 0;
    auto* const product = ggml_mul_mat(tensors_, blocks, last);
    ggml_prec_set_acc(product, GGML_PREC_F32);
    return add(ggml_reshape_4d(tensors_, add(product), k->ne[1], 1, q->ne[2], 1));
}

// K·Q of the wanted queries: recomputed with flash attention, which does not store the product.
ggml_tensor* device_node_builder::product_of(const attention_site& site, int n_rows) {
    if (!site.flash) return contiguous(last_queries(site.kq, n_rows));
    const int n_stream = streams_in(site.q).count;
    if (needs_blocks(site, n_rows, n_stream, device_)) return product_by_blocks(site);
    auto* const keys = last_queries(site.k, static_cast<int>(site.k->ne[1]));
    auto* const product = ggml_mul_mat(tensors_, keys, last_queries(site.q, n_rows));
    ggml_prec_set_acc(product, GGML_PREC_F32);  // as llama.cpp does for its own product
    return add(product);
}

// The softmax's input without the mask. Without flash attention, llama.cpp has already applied the
// softcap.
ggml_tensor* device_node_builder::scores_of(const attention_site& site, int n_rows) {
    auto* scores = site.flash ? product_of(site, n_rows)
                              : contiguous(last_queries(site.softmax->src[0], n_rows));
    const float cap = site.flash ? site.softcap : 0.0f;
    scores = add(ggml_scale(tensors_, scores, cap == 0.0f ? site.scale : site.scale / cap));
    if (cap != 0.0f) {
        scores = add(ggml_tanh(tensors_, scores));
        scores = add(ggml_scale(tensors_, scores, cap));
    }
    return scores;
}

// F32 ne=[n_cells, n_rows, n_head, n_stream], contiguous. Except for probs, columns that a query
// does not see hold arbitrary values: see `masked`.
ggml_tensor* device_node_builder::values_of(const attention_site& site, row_kind kind, int n_rows) {
    if (kind == row_kind::logits) return product_of(site, n_rows);
    if (kind == row_kind::scores) return scores_of(site, n_rows);
    if (!site.flash) return contiguous(last_queries(site.softmax, n_rows));
    const bool is_capped = site.softcap != 0.0f;
    auto* const logits = is_capped ? scores_of(site, n_rows) : product_of(site, n_rows);
    auto* const probs = ggml_soft_max_ext(tensors_, logits, softmax_mask_of(site, n_rows),
                                          is_capped ? 1.0f : site.scale, site.max_bias);
    if (site.sinks) ggml_soft_max_add_sinks(probs, site.sinks);
    return add(probs);
}

// Reduces over heads: F32 in memory as ne=[n_cells, n_rows, 1, n_stream]. Pools over an image whose
// rows are the selected heads, so that nothing has to be permuted.
ggml_tensor* device_node_builder::reduced(ggml_tensor* values, const device_want& want) {
    auto* heads = add(ggml_reshape_3d(tensors_, values, values->ne[0] * values->ne[1],
                                      values->ne[2], values->ne[3]));
    if (!want.heads.empty()) {
        const auto n = static_cast<std::int64_t>(want.heads.size());
        auto* const list = constants_
                               ? constants_->find(want.heads)
                               : ggml_new_tensor_2d(tensors_, GGML_TYPE_I32, n, values->ne[3]);
        if (!list) refuse_capture("a list of heads is not on its device");
        auto* const of_streams =
            list->ne[1] == values->ne[3]
                ? list
                : add(ggml_view_2d(tensors_, list, n, values->ne[3], list->nb[1], 0));
        heads = add(ggml_get_rows(tensors_, heads, of_streams));
    }
    return pooled(heads, heads->ne[1], want.reduce);
}

// Sums over spans: F32 in memory as ne=[n_spans, n_rows, n_head, n_stream]. Probabilities of cells
// that a query does not see are 0, so one matrix serves rows of every length. Each row is
// multiplied on its own: for several at once a device may choose a kernel that rounds them first.
ggml_tensor* device_node_builder::summed(ggml_tensor* probs,
                                         const std::vector<column_range>& spans) {
    auto* const matrix = constants_->find(spans);
    if (!matrix || matrix->ne[0] < probs->ne[0]) {
        refuse_capture("the spans of a row are not on its device");
    }
    const auto [n_rows, n_head, n_stream] = std::array{probs->ne[1], probs->ne[2], probs->ne[3]};
    // In the third dimension: ggml-vulkan repeats no matrix over the fourth.
    const auto n_all = n_rows * n_head * n_stream;
    auto* const rows =
        n_all <= largest_grid
            ? add(ggml_reshape_3d(tensors_, probs, probs->ne[0], 1, n_all))
            : add(ggml_reshape_4d(tensors_, probs, probs->ne[0], 1, n_rows, n_head * n_stream));
    auto* const of_cells =
        add(ggml_view_2d(tensors_, matrix, probs->ne[0], matrix->ne[1], matrix->nb[1], 0));
    auto* const sums = ggml_mul_mat(tensors_, of_cells, rows);
    ggml_prec_set_acc(sums, GGML_PREC_F32);
    return add(sums);
}

// The mean or maximum of `n` rows, which are the second dimension.
ggml_tensor* device_node_builder::pooled(ggml_tensor* rows, std::int64_t n, row_reduction reduce) {
    const auto height = static_cast<int>(n);
    return add(ggml_pool_2d(tensors_, rows, is_mean(reduce) ? GGML_OP_POOL_AVG : GGML_OP_POOL_MAX,
                            1, height, 1, height, 0, 0));
}

// Sets columns that the query does not see to -inf, in logits too. Runs after a reduction, because
// all heads share the mask, and because a max pool starts at the lowest finite number. The last
// query of a stream sees every column that is handed out, unless the model has windows.
ggml_tensor* device_node_builder::masked(ggml_tensor* values, const attention_site& site,
                                         row_kind kind, int n_rows, bool is_reduced) {
    if (kind == row_kind::probs || (n_rows == 1 && !has_window_)) return values;
    auto* const mask = mask_of(site, n_rows);
    if (!mask) return values;
    if (is_reduced) {
        const auto n_stream = ggml_nelements(values) / (mask->ne[0] * n_rows);
        values = add(ggml_reshape_4d(tensors_, values, mask->ne[0], n_rows, 1, n_stream));
    }
    return add(ggml_add(tensors_, values, mask));
}

device_rows device_node_builder::rows_of(const attention_site& site, const device_want& want,
                                         int n_rows) {
    check_support(site, want.kind, device_);
    device_rows rows;
    rows.layers = {site.il};
    rows.want = want;
    rows.n_queries = site.n_queries_of_step();
    rows.streams = streams_in(site.flash ? site.q : site.kq);
    auto* result = values_of(site, want.kind, n_rows);
    rows.n_values = want.n_values(static_cast<std::size_t>(result->ne[0]));
    rows.n_rows = static_cast<std::size_t>(result->ne[1]);
    rows.n_head = static_cast<std::size_t>(result->ne[2]);
    if (want.reduce != row_reduction::none) {
        result = reduced(result, want);
        rows.n_head = 1;
        rows.n_heads_reduced = n_heads_reduced(want, site);
    }
    if (want.type == row_type::f16 && want.kind != row_kind::probs) {
        // Before the mask adds -inf: a value that the cast made infinite would read as masked.
        result = add(ggml_clamp(tensors_, result, -largest_f16, largest_f16));
    }
    if (want.spans.empty()) {
        result = masked(result, site, want.kind, n_rows, want.reduce != row_reduction::none);
    } else {
        result = summed(contiguous(result), want.spans);
    }
    if (want.type == row_type::f16) {
        result = add(ggml_cast(tensors_, result, GGML_TYPE_F16));
    } else if (result->op == GGML_OP_RESHAPE && result == nodes_.back()) {
        nodes_.pop_back();
        result = result->src[0];  // of our own product: the same memory
    } else if (is_view(result) || (!site.flash && (result == site.kq || result == site.softmax))) {
        result = add(ggml_cont(tensors_, result));  // llama.cpp overwrites its own tensor
    }
    rows.tensor = result;
    return rows;
}

ggml_tensor* device_node_builder::part_of(joined_layers& joined, const attention_site& site) {
    check_support(site, joined.want.kind, device_);
    auto* const part = reduced(values_of(site, joined.want.kind, joined.n_rows), joined.want);
    part->src[1] = std::exchange(joined.last_part, part);
    return part;
}

device_rows device_node_builder::join(const joined_layers& joined) {
    const auto& first = *joined.sites.front();
    device_rows rows;
    for (const auto* const site : joined.sites) rows.layers.push_back(site->il);
    rows.want = joined.want;
    rows.n_queries = first.n_queries_of_step();
    rows.streams = streams_in(first.flash ? first.q : first.kq);
    rows.n_values = static_cast<std::size_t>(first.flash ? first.k->ne[1] : first.kq->ne[0]);
    rows.n_rows = static_cast<std::size_t>(joined.n_rows);
    rows.n_head = 1;
    rows.n_heads_reduced = joined.n_heads * static_cast<int>(joined.sites.size());
    auto* const result = pooled(joined.stack, joined.stack->ne[1], joined.want.reduce);
    result->src[1] = joined.last_part;
    rows.tensor = masked(result, first, joined.want.kind, joined.n_rows, true);
    return rows;
}

ggml_tensor* device_node_builder::last_query_of(const attention_site& site) {
    const auto first = static_cast<int>(site.q->ne[1]) - 1;
    return add(ggml_cont(tensors_, queries(site.q, first, 1, {0, site.n_stream})));
}

ggml_tensor* device_node_builder::last_mask_of(const attention_site& site) {
    const slot_range all{0, static_cast<int>(site.mask->ne[3])};
    return add(ggml_cont(tensors_, queries(site.mask, site.n_queries() - 1, 1, all)));
}

ggml_tensor* device_node_builder::hidden_of(const hidden_site& site, int n_rows) {
    return add(ggml_cont(tensors_, last_queries(site.output, n_rows)));
}

void node_constants::keep(wanted all, int n_streams) {
    if (all == kept_) return;
    kept_ = {};
    found_.clear();
    buffer_.reset();
    tensors_.reset();
    const auto n_tensors = all.lists.size() + all.matrices.size();
    if (n_tensors == 0) return;
    tensors_.reset(ggml_init({n_tensors * ggml_tensor_overhead() + 1, nullptr, true}));
    std::vector<ggml_tensor*> made;
    for (const auto& heads : all.lists) {
        made.push_back(ggml_new_tensor_2d(tensors_.get(), GGML_TYPE_I32,
                                          static_cast<std::int64_t>(heads.size()), n_streams));
    }
    for (const auto& [spans, n_cells] : all.matrices) {
        made.push_back(ggml_new_tensor_2d(tensors_.get(), GGML_TYPE_F32,
                                          static_cast<std::int64_t>(n_cells),
                                          static_cast<std::int64_t>(spans.size())));
    }
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(tensors_.get(),
                                                           ggml_backend_dev_buffer_type(device_)));
    if (!buffer_) {
        tensors_.reset();
        throw error(errc::out_of_memory, ggml_backend_dev_name(device_),
                    " has no memory left for the list of captured heads or spans; lower n_ctx, "
                    "n_slots or n_gpu_layers");
    }
    auto tensor = made.begin();
    for (const auto& heads : all.lists) {
        std::vector<std::int32_t> rows;
        for (int i = 0; i < n_streams; ++i) rows.insert(rows.end(), heads.begin(), heads.end());
        ggml_backend_tensor_set(*tensor++, rows.data(), 0, rows.size() * sizeof(std::int32_t));
    }
    for (const auto& [spans, n_cells] : all.matrices) {
        std::vector<float> rows(spans.size() * n_cells, 0.0f);
        for (std::size_t i = 0; i < spans.size(); ++i) {
            const auto start = std::min(static_cast<std::size_t>(spans[i].start), n_cells);
            const auto stop = std::min(static_cast<std::size_t>(spans[i].stop), n_cells);
            std::fill_n(rows.data() + i * n_cells + start, stop - start, 1.0f);
        }
        ggml_backend_tensor_set(*tensor++, rows.data(), 0, rows.size() * sizeof(float));
    }
    kept_ = std::move(all);
    found_ = std::move(made);
}

ggml_tensor* node_constants::find(const heads& wanted) const {
    const auto found = kept_.lists.find(wanted);
    if (found == kept_.lists.end()) return nullptr;
    return found_[static_cast<std::size_t>(std::distance(kept_.lists.begin(), found))];
}

ggml_tensor* node_constants::find(const spans& wanted) const {
    const auto found = kept_.matrices.find(wanted);
    if (found == kept_.matrices.end()) return nullptr;
    return found_[kept_.lists.size() +
                  static_cast<std::size_t>(std::distance(kept_.matrices.begin(), found))];
}

}  // namespace kqview
