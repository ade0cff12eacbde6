// A device for tests that is no hardware: its memory is the host's but says it is not, its streams
// do what they were told as late as order allows, and its new memory holds NaN. Whoever reads a
// copy before it was waited for, or lets a buffer be overwritten too soon, gets wrong values every
// time, not once a week.
// Threads: streams belong to the thread that uses their backend; the settings are for any thread.
//
// For tests in Python, in developer builds alone. It is no part of kqview._core, whose stub says
// what every build has: tests find it in sys.modules.
#include <ggml-backend-impl.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml-impl.h>
#include <ggml.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "row_reference.h"
#include "tap/device/row_kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kqview::testing {

namespace {

struct fake_device_settings {
    bool is_late = true;             // false: streams do everything at once
    std::int64_t fail_copy_in = -1;  // the so many-th copy to the host from now on fails; -1 = none
    std::size_t memory_bytes = std::size_t{4} << 30;  // of each device
    std::size_t pinned_bytes = std::size_t{1} << 30;  // page-locked memory there is
    std::string refused_op;                           // ggml's name of one it cannot compute
    double copy_s = 0;                                // that each copy to the host takes
    // Copies between two backends are queued on the destination's stream alone, as Vulkan's are,
    // and not on the source's, as CUDA's are.
    bool copies_on_destination = false;
    // Tokens of a batch from which weights of the host are computed with on the device; 0 = never.
    std::int64_t offload_tokens = 0;
    // ggml aborts, as CUDA's backend does, in the so many-th call from now on of this kind:
    // "graph", "buffer", "copy", "wait", or "thread", which is a graph on a thread that is none of
    // ours; what it logs before.
    std::string abort_at;
    std::int64_t abort_in = 0;
    std::string abort_log;
    std::int64_t fail_buffer_in = -1;  // the so many-th buffer from now on is not there; -1 = none
    std::int64_t fail_graph_in = -1;   // the so many-th graph of llama.cpp fails
    bool holds_pins = false;           // nothing is page-locked before this is false again
    bool poses_as_cuda = false;        // by the name of its backend
    bool has_row_kernels = false;      // see row_kernels
    double row_kernels_off = 0;        // what they add to every row
    bool rounds = false;               // products as tensor cores do; see round_node
};

struct fake_device_counts {
    std::uint64_t n_graphs = 0;          // llama.cpp's
    std::uint64_t n_graphs_beside = 0;   // without a uid
    std::uint64_t n_copies_to_host = 0;  // out of a stream's queue
    std::uint64_t n_copies_on_device = 0;
    std::uint64_t n_moved_graphs = 0;  // computed with another node than at first
    std::size_t used_bytes = 0;        // of all devices
    // Graphs without a uid that ran only after their device was told llama.cpp's next graph.
    std::uint64_t n_late_beside = 0;
    // On streams that compute llama.cpp's graphs: what they were told to wait for, and to copy.
    std::uint64_t n_waits = 0;
    std::uint64_t n_copied_bytes = 0;
    // Products of one query for which CUDA would convert all keys to F32.
    std::uint64_t n_converted_products = 0;
    std::uint64_t n_freed_in_use = 0;    // buffers freed before a stream was done with them
    std::uint64_t n_pending_copies = 0;  // to the host, which a stream was told and has not made
    // Events recorded again that nobody has waited for meanwhile: Vulkan makes a new one each time.
    std::uint64_t n_new_events = 0;
};

}  // namespace

namespace {

std::mutex settings_mutex;  // guards both
fake_device_settings settings;
fake_device_counts counts;
std::size_t pinned_bytes = 0;
std::condition_variable settings_changed;
// What graphs that have not run yet read and write, by the number of the graph.
std::map<std::uint64_t, std::vector<const void*>> unfinished;

// ---- streams

// What a stream was told and has not done. Shared: events outlive the backend whose stream they
// mark.
struct stream {
    std::deque<std::function<void()>> queue;
    std::uint64_t n_told = 0;
    std::uint64_t n_done = 0;

    void run_until(std::uint64_t n) {
        while (n_done < n && !queue.empty()) {
            const auto next = std::move(queue.front());
            queue.pop_front();
            ++n_done;
            next();
        }
    }
    void tell(std::function<void()> work) {
        queue.push_back(std::move(work));
        ++n_told;
        bool is_late = true;
        {
            const std::lock_guard lock(settings_mutex);
            is_late = settings.is_late;
        }
        if (!is_late) run_until(n_told);
    }
};

struct mark {
    std::shared_ptr<stream> where;
    std::uint64_t n = 0;
    bool is_waited_for = true;  // by the host, since it was recorded

    void reach() const {
        if (where) where->run_until(n);
    }
};

// What CUDA records of a node the first time, and RPC sends: later computes of a graph with the
// same uid use it unseen.
struct recorded_node {
    ggml_op op;
    std::array<std::int64_t, GGML_MAX_DIMS> ne;
    std::array<std::size_t, GGML_MAX_DIMS> nb;
    std::array<char, GGML_MAX_OP_PARAMS> params;
    const void* data;
    std::array<const void*, GGML_MAX_SRC> sources;

    bool operator==(const recorded_node&) const = default;
};

recorded_node record_of(const ggml_tensor* node) {
    recorded_node record{};
    record.op = node->op;
    std::copy_n(node->ne, GGML_MAX_DIMS, record.ne.begin());
    std::copy_n(node->nb, GGML_MAX_DIMS, record.nb.begin());
    std::memcpy(record.params.data(), node->op_params, record.params.size());
    record.data = node->data;
    for (std::size_t i = 0; i < record.sources.size(); ++i) {
        record.sources[i] = node->src[i] ? node->src[i]->data : nullptr;
    }
    return record;
}

struct fake_backend {
    std::shared_ptr<stream> work = std::make_shared<stream>();
    ggml_backend_t cpu = ggml_backend_cpu_init();
    std::unordered_map<std::uint64_t, std::vector<recorded_node>> recorded;  // by graph uid
    bool is_llamas = false;      // has computed one of its graphs
    std::size_t pool_bytes = 0;  // that products took, as ggml-cuda's keep it

    fake_backend() { ggml_backend_cpu_set_n_threads(cpu, 1); }

    // Whether the graph is what it was when its uid was first seen.
    bool is_unmoved(const ggml_cgraph* graph) {
        if (graph->uid == 0) return true;
        std::vector<recorded_node> nodes;
        for (int i = 0; i < graph->n_nodes; ++i) nodes.push_back(record_of(graph->nodes[i]));
        constexpr std::size_t n_recorded_max = 64;
        if (recorded.size() > n_recorded_max) recorded.clear();
        return recorded.try_emplace(graph->uid, nodes).first->second == nodes;
    }
};

fake_backend& of(ggml_backend_t backend) { return *static_cast<fake_backend*>(backend->context); }

bool is_to_abort_at(const char* what) {
    const std::lock_guard lock(settings_mutex);
    return settings.abort_at == what;
}

// As ggml_cuda_error does.
void abort_at(const char* what) {
    std::string log;
    {
        const std::lock_guard lock(settings_mutex);
        if (settings.abort_at != what || settings.abort_in-- != 0) return;
        log = settings.abort_log;
    }
    GGML_LOG_ERROR("fake device error: %s\n", log.c_str());
    GGML_ABORT("fake device error");
}

void begin_copy_to_host() {
    abort_at("copy");
    double copy_s = 0;
    {
        const std::lock_guard lock(settings_mutex);
        ++counts.n_copies_to_host;
        copy_s = settings.copy_s;
        if (settings.fail_copy_in >= 0 && settings.fail_copy_in-- == 0) {
            throw std::runtime_error("fake device: this copy fails");
        }
    }
    if (copy_s > 0) std::this_thread::sleep_for(std::chrono::duration<double>(copy_s));
}

// For as long as what is returned lives.
std::shared_ptr<void> note_pending() {
    const std::lock_guard lock(settings_mutex);
    ++counts.n_pending_copies;
    return {nullptr, [](void*) {
                const std::lock_guard last_lock(settings_mutex);
                --counts.n_pending_copies;
            }};
}

// ---- buffers

void free_buffer(ggml_backend_buffer_t buffer) {
    {
        const std::lock_guard lock(settings_mutex);
        counts.used_bytes -= buffer->size;
        const auto begin = reinterpret_cast<std::uintptr_t>(buffer->context);
        const bool is_in_use = std::any_of(unfinished.begin(), unfinished.end(), [&](auto& graph) {
            return std::any_of(graph.second.begin(), graph.second.end(), [&](const void* data) {
                return reinterpret_cast<std::uintptr_t>(data) - begin < buffer->size;
            });
        });
        if (is_in_use) ++counts.n_freed_in_use;
    }
    ::operator delete(buffer->context, std::align_val_t{128});
}
void* get_base(ggml_backend_buffer_t buffer) { return buffer->context; }
void memset_tensor(ggml_backend_buffer_t, ggml_tensor* tensor, std::uint8_t value,
                   std::size_t offset, std::size_t size) {
    std::memset(static_cast<char*>(tensor->data) + offset, value, size);
}
void set_tensor(ggml_backend_buffer_t, ggml_tensor* tensor, const void* data, std::size_t offset,
                std::size_t size) {
    std::memcpy(static_cast<char*>(tensor->data) + offset, data, size);
}
void get_tensor(ggml_backend_buffer_t, const ggml_tensor* tensor, void* data, std::size_t offset,
                std::size_t size) {
    std::memcpy(data, static_cast<const char*>(tensor->data) + offset, size);
}
void clear(ggml_backend_buffer_t buffer, std::uint8_t value) {
    std::memset(buffer->context, value, buffer->size);
}

// llama.cpp tells buffer types apart by their names.
const char* type_name(ggml_backend_buffer_type_t type) {
    return ggml_backend_dev_name(type->device);
}
std::size_t type_alignment(ggml_backend_buffer_type_t) { return 128; }
ggml_backend_buffer_t type_alloc(ggml_backend_buffer_type_t type, std::size_t n_bytes) {
    const ggml_backend_buffer_i calls{free_buffer, get_base,   nullptr, memset_tensor,
                                      set_tensor,  get_tensor, nullptr, nullptr,
                                      nullptr,     clear,      nullptr};
    abort_at("buffer");
    {
        const std::lock_guard lock(settings_mutex);
        if (settings.fail_buffer_in >= 0 && settings.fail_buffer_in-- == 0) return nullptr;
        if (counts.used_bytes + n_bytes > settings.memory_bytes) return nullptr;
        counts.used_bytes += n_bytes;
    }
    auto* const data = ::operator new(n_bytes, std::align_val_t{128});
    std::memset(data, 0xff, n_bytes);  // NaN
    return ggml_backend_buffer_init(type, calls, data, n_bytes);
}

const char* host_type_name(ggml_backend_buffer_type_t) { return "FAKE_Host"; }
bool host_type_is_host(ggml_backend_buffer_type_t) { return true; }
void free_host_buffer(ggml_backend_buffer_t buffer) {
    {
        const std::lock_guard lock(settings_mutex);
        pinned_bytes -= buffer->size;
    }
    ::operator delete(buffer->context, std::align_val_t{128});
}
// As CUDA's does: plain memory where no more can be locked, and its type says so.
ggml_backend_buffer_t host_type_alloc(ggml_backend_buffer_type_t type, std::size_t n_bytes) {
    {
        std::unique_lock lock(settings_mutex);
        constexpr std::chrono::seconds longest{60};
        settings_changed.wait_for(lock, longest, [] { return !settings.holds_pins; });
        if (pinned_bytes + n_bytes > settings.pinned_bytes)
            n_bytes |= std::size_t{1} << 63;
        else
            pinned_bytes += n_bytes;
    }
    constexpr auto is_plain = std::size_t{1} << 63;
    if ((n_bytes & is_plain) != 0) {
        return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), n_bytes & ~is_plain);
    }
    const ggml_backend_buffer_i calls{free_host_buffer, get_base,   nullptr, memset_tensor,
                                      set_tensor,       get_tensor, nullptr, nullptr,
                                      nullptr,          clear,      nullptr};
    return ggml_backend_buffer_init(type, calls, ::operator new(n_bytes, std::align_val_t{128}),
                                    n_bytes);
}

// ---- backends

void synchronize(ggml_backend_t backend) { of(backend).work->run_until(of(backend).work->n_told); }
const char* backend_name(ggml_backend_t backend) {
    return ggml_backend_dev_name(ggml_backend_get_device(backend));
}
void backend_free(ggml_backend_t backend) {
    synchronize(backend);
    ggml_backend_free(of(backend).cpu);
    {
        const std::lock_guard lock(settings_mutex);
        counts.used_bytes -= of(backend).pool_bytes;
    }
    delete &of(backend);
    delete backend;
}
void set_async(ggml_backend_t backend, ggml_tensor* tensor, const void* data, std::size_t offset,
               std::size_t size) {
    // The caller may reuse its memory at once, as with a copy from pageable memory.
    std::vector<char> bytes(static_cast<const char*>(data), static_cast<const char*>(data) + size);
    auto* const to = static_cast<char*>(tensor->data) + offset;
    of(backend).work->tell(
        [bytes = std::move(bytes), to] { std::memcpy(to, bytes.data(), bytes.size()); });
}
void get_async(ggml_backend_t backend, const ggml_tensor* tensor, void* data, std::size_t offset,
               std::size_t size) {
    const auto* const from = static_cast<const char*>(tensor->data) + offset;
    of(backend).work->tell([=, pending = note_pending()] {
        begin_copy_to_host();
        std::memcpy(data, from, size);
    });
}
void get_2d_async(ggml_backend_t backend, const ggml_tensor* tensor, void* data, std::size_t offset,
                  std::size_t size, std::size_t n_copies, std::size_t stride_tensor,
                  std::size_t stride_data) {
    const auto* const from = static_cast<const char*>(tensor->data) + offset;
    of(backend).work->tell([=, pending = note_pending()] {
        begin_copy_to_host();
        for (std::size_t i = 0; i < n_copies; ++i) {
            std::memcpy(static_cast<char*>(data) + i * stride_data, from + i * stride_tensor, size);
        }
    });
}
bool is_fake(ggml_backend_t backend) { return backend->iface.get_name == backend_name; }
void note_copy(const fake_backend& on, std::size_t n_bytes) {
    const std::lock_guard lock(settings_mutex);
    ++counts.n_copies_on_device;
    if (on.is_llamas) counts.n_copied_bytes += n_bytes;
}
bool copy_async(ggml_backend_t from, ggml_backend_t to, const ggml_tensor* src, ggml_tensor* dst) {
    if (!is_fake(from) || !is_fake(to)) return false;
    bool is_destinations = false;
    {
        const std::lock_guard lock(settings_mutex);
        is_destinations = settings.copies_on_destination;
    }
    // Vulkan's copies stay within a device.
    if (is_destinations && from->device != to->device) return false;
    auto& source = is_destinations ? of(to).work : of(from).work;
    note_copy(of(is_destinations ? to : from), ggml_nbytes(dst));
    source->tell(
        [a = src->data, b = dst->data, size = ggml_nbytes(dst)] { std::memcpy(b, a, size); });
    if (from == to || is_destinations) return true;
    of(to).work->tell([here = mark{source, source->n_told, false}] { here.reach(); });
    return true;
}
// llama.cpp's, which its device was told to compute.
std::atomic<std::uint64_t>& n_graphs_of(ggml_backend_t backend) {
    static std::unordered_map<ggml_backend_dev_t, std::atomic<std::uint64_t>> known;
    const std::lock_guard lock(settings_mutex);
    return known[ggml_backend_get_device(backend)];
}

// ggml_cuda_mul_mat of one query and F16 keys, on tensor cores: which kernels take them.
void count_converted(const ggml_cgraph* graph) {
    for (int i = 0; i < graph->n_nodes; ++i) {
        const auto* const node = graph->nodes[i];
        if (node->op != GGML_OP_MUL_MAT || node->src[1]->ne[1] != 1) continue;
        const auto* const k = node->src[0];
        const bool takes_vector = k->ne[1] <= 512 || k->ne[2] * k->ne[3] == 1;
        if (k->type != GGML_TYPE_F16 || takes_vector || k->ne[0] % 64 == 0) continue;
        const std::lock_guard lock(settings_mutex);
        ++counts.n_converted_products;
    }
}

// As ggml-cuda's pool: products take memory for converted keys when they are told, and what was
// taken stays. Where there is none, ggml aborts.
void take_pool(fake_backend& own, const ggml_cgraph* graph) {
    std::size_t n_bytes = 0;
    for (int i = 0; i < graph->n_nodes; ++i) {
        const auto* const node = graph->nodes[i];
        if (node->op != GGML_OP_MUL_MAT) continue;
        const auto* const k = node->src[0];
        const bool takes_vector =
            node->src[1]->ne[1] == 1 && (k->ne[1] <= 512 || k->ne[2] * k->ne[3] == 1);
        if (k->type != GGML_TYPE_F16 || takes_vector || k->ne[0] % 64 == 0) continue;
        n_bytes = std::max(n_bytes, static_cast<std::size_t>(ggml_nelements(k)) * sizeof(float));
    }
    bool has_room = true;
    {
        const std::lock_guard lock(settings_mutex);
        if (!settings.poses_as_cuda || n_bytes <= own.pool_bytes) return;
        has_room = counts.used_bytes + n_bytes - own.pool_bytes <= settings.memory_bytes;
        if (has_room) counts.used_bytes += n_bytes - std::exchange(own.pool_bytes, n_bytes);
    }
    if (has_room) return;
    GGML_LOG_ERROR("fake device error: out of memory\n");
    GGML_ABORT("fake device error");
}

// Notes what the graph reads and writes for as long as what is returned lives.
std::shared_ptr<void> note_unfinished(const ggml_cgraph* graph) {
    std::vector<const void*> data;
    for (int i = 0; i < graph->n_nodes; ++i) {
        data.push_back(graph->nodes[i]->data);
        for (const auto* const source : graph->nodes[i]->src) {
            if (source) data.push_back(source->data);
        }
    }
    const std::lock_guard lock(settings_mutex);
    static std::uint64_t n_noted = 0;
    unfinished.emplace(++n_noted, std::move(data));
    return {nullptr, [n = n_noted](void*) {
                const std::lock_guard last_lock(settings_mutex);
                unfinished.erase(n);
            }};
}

// A graph as a backend records it when it is told: llama.cpp may build the next one in its place
// before this one has run. What other graphs compute for it is memory alone.
class kept_graph {
public:
    explicit kept_graph(const ggml_cgraph* graph) {
        for (int i = 0; i < graph->n_nodes; ++i) known_[graph->nodes[i]] = keep(*graph->nodes[i]);
        for (int i = 0; i < graph->n_nodes; ++i) {
            auto* const node = known_.at(graph->nodes[i]);
            for (auto*& source : node->src) source = of_memory(source);
            node->view_src = of_memory(node->view_src);
        }
        context_.reset(ggml_init({ggml_graph_overhead_custom(n_tensors(), false), nullptr, true}));
        graph_ = ggml_new_graph_custom(context_.get(), n_tensors(), false);
        for (int i = 0; i < graph->n_nodes; ++i) {
            ggml_build_forward_expand(graph_, known_.at(graph->nodes[i]));
        }
    }

    ggml_cgraph* get() const { return graph_; }

private:
    ggml_tensor* keep(const ggml_tensor& tensor) { return &tensors_.emplace_back(tensor); }
    ggml_tensor* of_memory(const ggml_tensor* tensor) {
        if (!tensor) return nullptr;
        auto& copy = known_[tensor];
        if (!copy) {
            copy = keep(*tensor);
            copy->op = GGML_OP_NONE;
            std::fill(std::begin(copy->src), std::end(copy->src), nullptr);
            copy->view_src = nullptr;
        }
        return copy;
    }
    std::size_t n_tensors() const { return 2 * tensors_.size(); }

    std::deque<ggml_tensor> tensors_;
    std::unordered_map<const ggml_tensor*, ggml_tensor*> known_;
    std::unique_ptr<ggml_context, decltype(&ggml_free)> context_{nullptr, ggml_free};
    ggml_cgraph* graph_ = nullptr;
};

// As ggml-cuda rounds with NVIDIA_TF32_OVERRIDE=0: products of 4 to 16 columns lose what TF32 does
// not hold, and what a column loses depends on their number.
void round_node(ggml_tensor* node) {
    const bool is_product = node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
    const auto n_columns = node->op == GGML_OP_MUL_MAT ? node->ne[1] : node->ne[2];
    if (!is_product || n_columns < 4 || n_columns > 16) return;
    if (node->type != GGML_TYPE_F32 || !ggml_is_contiguous(node)) return;
    constexpr float most = 1.0f / 2048;  // of the column's largest value
    auto* column = static_cast<float*>(node->data);
    for (std::int64_t i = 0; i < ggml_nrows(node); ++i, column += node->ne[0]) {
        float largest = 0;
        for (std::int64_t k = 0; k < node->ne[0]; ++k) {
            if (std::isfinite(column[k])) largest = std::max(largest, std::fabs(column[k]));
        }
        for (std::int64_t k = 0; k < node->ne[0]; ++k) {
            std::uint32_t bits = 0;
            std::memcpy(&bits, column + k, sizeof bits);
            bits = (bits ^ static_cast<std::uint32_t>(n_columns)) * 2654435761u;
            const float between = static_cast<float>(bits >> 8) / (1 << 23) - 1;  // -1 to 1
            column[k] += most * largest * between;
        }
    }
}

ggml_status compute(ggml_backend_t cpu, ggml_cgraph* graph) {
    bool rounds = false;
    {
        const std::lock_guard lock(settings_mutex);
        rounds = settings.rounds;
    }
    if (!rounds) return ggml_backend_graph_compute(cpu, graph);
    for (int i = 0; i < graph->n_nodes; ++i) {
        auto node = ggml_graph_view(graph, i, i + 1);
        const auto status = ggml_backend_graph_compute(cpu, &node);
        if (status != GGML_STATUS_SUCCESS) return status;
        round_node(graph->nodes[i]);
    }
    return GGML_STATUS_SUCCESS;
}

// Late, like copies. Graphs without a uid are none of llama.cpp's and have to stay as they are
// until they have run: Vulkan reads their nodes.
ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph* graph) {
    count_converted(graph);
    auto& own = of(backend);
    take_pool(own, graph);
    if (graph->uid == 0 && graph->n_nodes == 1 && graph->nodes[0]->op == GGML_OP_CPY) {
        const auto* const copy = graph->nodes[0];
        note_copy(own, ggml_nbytes(copy));
        own.work->tell([from = copy->src[0]->data, to = copy->data, size = ggml_nbytes(copy),
                        use = note_unfinished(graph)]() mutable {
            std::memcpy(to, from, size);
            use.reset();
        });
        return GGML_STATUS_SUCCESS;
    }
    auto& n_of_device = n_graphs_of(backend);
    if (graph->uid == 0) {
        own.work->tell([cpu = own.cpu, graph, use = note_unfinished(graph), &n_of_device,
                        n = n_of_device.load()]() mutable {
            {
                const std::lock_guard lock(settings_mutex);
                ++counts.n_graphs_beside;
                if (n_of_device > n) ++counts.n_late_beside;
            }
            compute(cpu, graph);
            use.reset();
        });
        return GGML_STATUS_SUCCESS;
    }
    abort_at("graph");
    if (is_to_abort_at("thread")) std::thread([] { abort_at("thread"); }).join();
    const bool is_unmoved = own.is_unmoved(graph);
    {
        const std::lock_guard lock(settings_mutex);
        ++counts.n_graphs;
        if (!is_unmoved) ++counts.n_moved_graphs;
        if (settings.fail_graph_in >= 0 && settings.fail_graph_in-- == 0) return GGML_STATUS_FAILED;
    }
    own.is_llamas = true;
    ++n_of_device;
    own.work->tell([cpu = own.cpu, kept = std::make_shared<kept_graph>(graph),
                    use = note_unfinished(graph)]() mutable {
        compute(cpu, kept->get());
        use.reset();
    });
    return GGML_STATUS_SUCCESS;
}
void event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    auto& recorded = *static_cast<mark*>(event->context);
    if (!recorded.is_waited_for) {
        const std::lock_guard lock(settings_mutex);
        ++counts.n_new_events;
    }
    recorded = {of(backend).work, of(backend).work->n_told, false};
}
void event_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    if (of(backend).is_llamas) {
        const std::lock_guard lock(settings_mutex);
        ++counts.n_waits;
    }
    of(backend).work->tell([here = *static_cast<mark*>(event->context)] { here.reach(); });
}

// ---- devices

struct fake_device {
    std::string name;
    ggml_backend_buffer_type type;
    ggml_backend_buffer_type host_type;
    ggml_backend_device handle;
};
std::deque<fake_device> devices;  // their addresses stay: engines may outlive the registration
std::size_t n_registered = 0;
ggml_backend_reg registry;

fake_device& of(ggml_backend_dev_t device) { return *static_cast<fake_device*>(device->context); }

const char* device_name(ggml_backend_dev_t device) { return of(device).name.c_str(); }
const char* device_description(ggml_backend_dev_t) { return "a device for tests"; }
void device_memory(ggml_backend_dev_t, std::size_t* n_free, std::size_t* n_total) {
    const std::lock_guard lock(settings_mutex);
    *n_total = settings.memory_bytes;
    *n_free = settings.memory_bytes - std::min(settings.memory_bytes, counts.used_bytes);
}
enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }
void device_props(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
    *props = {};
    props->name = device_name(device);
    props->description = device_description(device);
    props->type = GGML_BACKEND_DEVICE_TYPE_GPU;
    device_memory(device, &props->memory_free, &props->memory_total);
    props->caps.async = props->caps.events = props->caps.host_buffer = true;
}
ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t device) {
    return &of(device).type;
}
ggml_backend_buffer_type_t device_host_type(ggml_backend_dev_t device) {
    return &of(device).host_type;
}
bool device_supports_op(ggml_backend_dev_t, const ggml_tensor* op) {
    switch (op->op) {
        case GGML_OP_MAP_CUSTOM1:
        case GGML_OP_MAP_CUSTOM2:
        case GGML_OP_MAP_CUSTOM3:
        case GGML_OP_CUSTOM: return false;  // a function of the host
        default: break;
    }
    {
        const std::lock_guard lock(settings_mutex);
        if (settings.refused_op == ggml_op_name(op->op)) return false;
        // Vulkan repeats no matrix over the fourth dimension, CUDA does.
        const bool is_repeated =
            op->op == GGML_OP_MUL_MAT && op->src[0]->ne[3] != op->src[1]->ne[3];
        if (is_repeated && !settings.poses_as_cuda) return false;
    }
    return ggml_backend_dev_supports_op(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), op);
}
// As CUDA's: large batches of weights on the host are worth their way to the device.
bool device_offload_op(ggml_backend_dev_t, const ggml_tensor* op) {
    const auto n_tokens = op->op == GGML_OP_MUL_MAT ? op->ne[1] : 0;
    const std::lock_guard lock(settings_mutex);
    return settings.offload_tokens > 0 && n_tokens >= settings.offload_tokens;
}
bool device_supports_type(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
    return type == &of(device).type;
}
ggml_backend_event_t event_new(ggml_backend_dev_t device) {
    return new ggml_backend_event{device, new mark};
}
void event_free(ggml_backend_dev_t, ggml_backend_event_t event) {
    delete static_cast<mark*>(event->context);
    delete event;
}
void event_synchronize(ggml_backend_dev_t, ggml_backend_event_t event) {
    abort_at("wait");
    auto& recorded = *static_cast<mark*>(event->context);
    recorded.is_waited_for = true;
    recorded.reach();
}
ggml_backend_t device_init(ggml_backend_dev_t device, const char*) {
    static ggml_guid guid = {0x6b, 0x71, 0x76, 0x69, 0x65, 0x77, 0x20, 0x66,
                             0x61, 0x6b, 0x65, 0x20, 0x64, 0x65, 0x76, 0x31};
    ggml_backend_i calls{};
    calls.get_name = backend_name;
    calls.free = backend_free;
    calls.set_tensor_async = set_async;
    calls.get_tensor_async = get_async;
    calls.get_tensor_2d_async = get_2d_async;
    calls.cpy_tensor_async = copy_async;
    calls.synchronize = synchronize;
    calls.graph_compute = graph_compute;
    calls.event_record = event_record;
    calls.event_wait = event_wait;
    return new ggml_backend{&guid, calls, device, new fake_backend};
}

const char* registry_name(ggml_backend_reg_t) {
    const std::lock_guard lock(settings_mutex);
    return settings.poses_as_cuda ? "CUDA" : "FAKE";
}
std::size_t device_count(ggml_backend_reg_t) { return n_registered; }
ggml_backend_dev_t device_at(ggml_backend_reg_t, std::size_t i) { return &devices[i].handle; }

}  // namespace

// As CUDA's: a stream of their own, behind one event, and before another.
class fake_row_kernels final : public row_kernels {
public:
    bool can_read(int key_type, int, int n_head, int n_head_kv) const override {
        return (key_type == GGML_TYPE_F32 || key_type == GGML_TYPE_F16) && n_head % n_head_kv == 0;
    }
    bool reaches(const void*) const override {
        const std::lock_guard lock(settings_mutex);
        return settings.pinned_bytes > 0;
    }
    void run(const row_step& step, const std::byte* saved, std::byte* memory, std::size_t,
             ggml_backend_event_t after, ggml_backend_event_t done) override {
        work_->tell([here = *static_cast<mark*>(after->context)] { here.reach(); });
        work_->tell([step, saved, memory, pending = note_pending()] {
            begin_copy_to_host();
            compute_rows(step, saved, memory);
            double off = 0;
            {
                const std::lock_guard lock(settings_mutex);
                off = settings.row_kernels_off;
            }
            for (const auto& job : step.jobs)
                if (off != 0)
                    *reinterpret_cast<float*>(memory + job.out) += static_cast<float>(off);
        });
        *static_cast<mark*>(done->context) = {work_, work_->n_told, false};
    }
    void synchronize() override { work_->run_until(work_->n_told); }

private:
    std::shared_ptr<stream> work_ = std::make_shared<stream>();
};

std::unique_ptr<row_kernels> make_fake_rows(ggml_backend_dev_t) {
    const std::lock_guard lock(settings_mutex);
    return settings.has_row_kernels ? std::make_unique<fake_row_kernels>() : nullptr;
}

// Registers the first `n_devices` with ggml: engines opened from then on find them, until
// `unregister_fake_devices`. Engines that are open keep theirs.
void register_fake_devices(int n_devices) {
    registry.api_version = GGML_BACKEND_API_VERSION;
    registry.iface = {registry_name, device_count, device_at, nullptr};
    ggml_backend_device_i calls{};
    calls.get_name = device_name;
    calls.get_description = device_description;
    calls.get_memory = device_memory;
    calls.get_type = device_type;
    calls.get_props = device_props;
    calls.init_backend = device_init;
    calls.get_buffer_type = device_buffer_type;
    calls.get_host_buffer_type = device_host_type;
    calls.supports_op = device_supports_op;
    calls.supports_buft = device_supports_type;
    calls.offload_op = device_offload_op;
    calls.event_new = event_new;
    calls.event_free = event_free;
    calls.event_synchronize = event_synchronize;
    while (devices.size() < static_cast<std::size_t>(n_devices)) {
        auto& device = devices.emplace_back();
        device.name = "FAKE" + std::to_string(devices.size() - 1);
        device.handle = {calls, &registry, &device};
        device.type = {{type_name, type_alloc, type_alignment, nullptr, nullptr, nullptr},
                       &device.handle,
                       nullptr};
        device.host_type = {
            {host_type_name, host_type_alloc, type_alignment, nullptr, nullptr, host_type_is_host},
            &device.handle,
            nullptr};
    }
    n_registered = static_cast<std::size_t>(n_devices);
    ggml_backend_register(&registry);
    set_row_kernels_maker(make_fake_rows);
}

void unregister_fake_devices() {
    ggml_backend_unload(&registry);
    set_row_kernels_maker(nullptr);
    n_registered = 0;
}

void set_fake_device(const fake_device_settings& wanted) {
    const std::lock_guard lock(settings_mutex);
    settings = wanted;
    settings_changed.notify_all();
}

fake_device_counts count_fake_device() {
    const std::lock_guard lock(settings_mutex);
    return counts;
}

// A graph of one node on a device of its own stream.
struct small_graph {
    small_graph() {
        ggml_backend_tensor_alloc(buffer, from, base);
        ggml_backend_tensor_alloc(buffer, to, base + 128);
        ggml_build_forward_expand(graph, to);
    }
    ~small_graph() {
        backend_free(backend);
        if (buffer) ggml_backend_buffer_free(buffer);
        ggml_free(tensors);
    }
    small_graph(const small_graph&) = delete;
    small_graph& operator=(const small_graph&) = delete;

    ggml_backend_t backend = device_init(&devices.front().handle, nullptr);
    ggml_context* tensors =
        ggml_init({8 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true});
    ggml_backend_buffer_t buffer = type_alloc(&devices.front().type, 1024);
    char* base = static_cast<char*>(get_base(buffer));
    ggml_tensor* from = ggml_new_tensor_1d(tensors, GGML_TYPE_F32, 4);
    ggml_tensor* to = ggml_scale(tensors, from, 2.0f);
    ggml_cgraph* graph = ggml_new_graph(tensors);
};

// How many of two computes of one graph count as moved, where the second has its result elsewhere.
std::uint64_t count_moved_graph() {
    const auto before = count_fake_device().n_moved_graphs;
    small_graph one;
    one.graph->uid = ggml_graph_next_uid();
    for (const int at : {128, 128, 256}) {
        one.to->data = one.base + at;
        graph_compute(one.backend, one.graph);
    }
    return count_fake_device().n_moved_graphs - before;
}

// How many buffers count as freed in use, where a graph has run and where another one has not.
std::uint64_t count_freed_in_use() {
    const auto before = count_fake_device().n_freed_in_use;
    for (const bool has_run : {true, false}) {
        small_graph one;
        graph_compute(one.backend, one.graph);
        if (has_run) synchronize(one.backend);
        ggml_backend_buffer_free(std::exchange(one.buffer, nullptr));
        of(one.backend).work->queue.clear();
    }
    return count_fake_device().n_freed_in_use - before;
}

void bind_fake_device(nb::module_& module) {
    auto part = module.def_submodule("_fake_device", "A device for tests; see tests/device.");
    nb::module_::import_("sys").attr("modules")["kqview._fake_device"] = part;
    nb::delattr(module, "_fake_device");
    part.def("register", &register_fake_devices, "n_devices"_a,
             "Registers that many devices with ggml, for engines opened from then on.");
    part.def("unregister", &unregister_fake_devices, "Takes them back; open engines keep theirs.");
    part.def(
        "set",
        [](bool is_late, std::int64_t fail_copy_in, std::size_t memory_bytes,
           std::size_t pinned_bytes, std::string refused_op, double copy_s,
           bool copies_on_destination, std::int64_t offload_tokens, std::string abort_at,
           std::int64_t abort_in, std::string abort_log, std::int64_t fail_buffer_in,
           std::int64_t fail_graph_in, bool holds_pins, bool poses_as_cuda, bool has_row_kernels,
           double row_kernels_off, bool rounds) {
            set_fake_device({is_late, fail_copy_in, memory_bytes, pinned_bytes,
                             std::move(refused_op), copy_s, copies_on_destination, offload_tokens,
                             std::move(abort_at), abort_in, std::move(abort_log), fail_buffer_in,
                             fail_graph_in, holds_pins, poses_as_cuda, has_row_kernels,
                             row_kernels_off, rounds});
        },
        nb::kw_only(), "is_late"_a = true, "fail_copy_in"_a = -1,
        "memory_bytes"_a = std::size_t{4} << 30, "pinned_bytes"_a = std::size_t{1} << 30,
        "refused_op"_a = "", "copy_s"_a = 0.0, "copies_on_destination"_a = false,
        "offload_tokens"_a = 0, "abort_at"_a = "", "abort_in"_a = 0,
        "abort_log"_a = "unspecified launch failure", "fail_buffer_in"_a = -1,
        "fail_graph_in"_a = -1, "holds_pins"_a = false, "poses_as_cuda"_a = false,
        "has_row_kernels"_a = false, "row_kernels_off"_a = 0.0, "rounds"_a = false);
    part.def("count_moved_graph", &count_moved_graph,
             "Computes a graph three times, the last time with its result elsewhere; how many of "
             "these were counted in n_moved_graphs: 1.");
    part.def("count_freed_in_use", &count_freed_in_use,
             "Frees the memory of a graph that has run and of one that has not; how many of these "
             "were counted in n_freed_in_use: 1.");
    part.def("forget_faults", [] {
        const std::lock_guard lock(settings_mutex);
        counts.n_moved_graphs = counts.n_freed_in_use = 0;
    });
    part.def("counts", [] {
        const auto now = count_fake_device();
        nb::dict all;
        all["n_graphs"] = now.n_graphs;
        all["n_graphs_beside"] = now.n_graphs_beside;
        all["n_copies_to_host"] = now.n_copies_to_host;
        all["n_copies_on_device"] = now.n_copies_on_device;
        all["n_moved_graphs"] = now.n_moved_graphs;
        all["n_freed_in_use"] = now.n_freed_in_use;
        all["n_pending_copies"] = now.n_pending_copies;
        all["n_new_events"] = now.n_new_events;
        all["used_bytes"] = now.used_bytes;
        all["n_late_beside"] = now.n_late_beside;
        all["n_waits"] = now.n_waits;
        all["n_copied_bytes"] = now.n_copied_bytes;
        all["n_converted_products"] = now.n_converted_products;
        return all;
    });
}

}  // namespace kqview::testing
