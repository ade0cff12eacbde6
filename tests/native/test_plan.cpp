// capture_plan and graph_plan: which rows, in which order, and what devices do of them.
#include <doctest/doctest.h>

#include <optional>
#include <utility>
#include <vector>

#include "tap/plan.h"

using kqview::capture_options;
using kqview::capture_plan;
using kqview::graph_plan;
using kqview::row_kind;
using kqview::row_reduction;
using kqview::row_type;
using indices = std::optional<std::vector<int>>;

namespace {

// Layer 1 has no attention (a hybrid model), layer 3 has fewer heads; layer 9 has no named output.
const kqview::capture_source available{
    {{0, 4, 2, 0.125f}, {2, 4, 2, 0.125f}, {3, 2, 1, 0.125f}, {9, 4, 4, 0.125f}}, {0, 1, 2, 3}, 24};

capture_plan make(const indices& layers, const indices& heads, row_kind kind = row_kind::probs,
                  row_type type = row_type::f32) {
    capture_options options;
    options.kind = kind;
    options.type = type;
    options.layers = layers;
    options.heads = heads;
    return {options, available};
}

capture_plan make(row_reduction reduce, int top_k, std::vector<int> hidden = {}) {
    capture_options options;
    options.reduce = reduce;
    options.top_k = top_k;
    options.hidden = std::move(hidden);
    return {options, available};
}

}  // namespace

TEST_CASE("capture_plan: without layers and heads it is every head of every layer with attention") {
    const auto plan = make({}, {});
    CHECK(plan.n_rows() == 4 + 4 + 2 + 4);
    CHECK_FALSE(plan.is_uniform());
    std::vector<int> layers;
    std::vector<int> first_rows;
    for (const auto& rows : plan.layers()) {
        layers.push_back(rows.il);
        first_rows.push_back(rows.first_row);
    }
    CHECK(layers == std::vector{0, 2, 3, 9});
    CHECK(first_rows == std::vector{0, 4, 8, 10});
}

TEST_CASE("capture_plan: rows follow the order asked for") {
    const auto plan = make(indices{{9, 0}}, indices{{3, 0, 2}});
    REQUIRE(plan.layers().size() == 2);
    CHECK(plan.layers()[0].il == 9);
    CHECK(plan.layers()[1].il == 0);
    CHECK(plan.layers()[1].first_row == 3);
    CHECK(plan.layers()[1].heads == std::vector{3, 0, 2});
    CHECK(plan.is_uniform());
    CHECK(plan.n_rows() == 6);
}

TEST_CASE("graph_plan: it is the union of the layers and kinds of its captures") {
    graph_plan graph;
    CHECK(graph.is_empty());
    graph.add(make(indices{{0, 2}}, {}, row_kind::probs));
    graph.add(make(indices{{2, 9}}, {}, row_kind::logits));
    CHECK_FALSE(graph.is_empty());
    for (int il = 0; il < 12; ++il) {
        CAPTURE(il);
        CHECK(graph.wants(il, row_kind::probs) == (il == 0 || il == 2));
        CHECK(graph.wants(il, row_kind::logits) == (il == 2 || il == 9));
        CHECK_FALSE(graph.wants(il, row_kind::scores));
    }
}

TEST_CASE("graph_plan: hidden states are needs of their own") {
    graph_plan graph;
    graph.add(make(row_reduction::mean, 0, {1}));
    CHECK(graph.wants_hidden(1));
    CHECK_FALSE(graph.wants_hidden(0));
    CHECK_FALSE(graph.wants(1, row_kind::logits));
    CHECK_FALSE(graph.wants_prompt());
    graph_plan other;
    other.add(make(row_reduction::max, 0));
    CHECK_FALSE(graph == other);
}

TEST_CASE("graph_plan: the same needs compare equal whatever heads and order they came from") {
    graph_plan one;
    graph_plan other;
    one.add(make(indices{{0, 2}}, indices{{1}}));
    other.add(make(indices{{2}}, {}));
    CHECK_FALSE(one == other);
    other.add(make(indices{{0}}, indices{{0, 3}}));
    CHECK(one == other);
}

namespace {

// Layers 0 and 1 are on devices, layer 2 is the host's; and two devices, of which one cannot
// reduce.
const kqview::capture_source on_devices{
    {{0, 4, 2, 1.0f, true, true}, {1, 4, 2, 1.0f, true, true}, {2, 4, 2, 1.0f}}, {}, 0};
const kqview::capture_source partly_reducible{
    {{0, 4, 2, 1.0f, true, true}, {4, 4, 2, 1.0f, true, false}}, {}, 0};

capture_plan on_device(const kqview::capture_source& source, row_reduction reduce,
                       const indices& heads = {}, row_type type = row_type::f32, int top_k = 0) {
    capture_options options;
    options.reduce = reduce;
    options.heads = heads;
    options.type = type;
    options.top_k = top_k;
    return {options, source};
}

}  // namespace

TEST_CASE("capture_plan: a device leaves whole rows as they are handed out") {
    const auto plan = on_device(on_devices, row_reduction::none, indices{{2, 1}}, row_type::f16);
    const auto& rows = plan.layers().front();
    REQUIRE(rows.on_device);
    CHECK(rows.on_device->reduce == row_reduction::none);
    CHECK(rows.on_device->type == row_type::f16);
    CHECK(rows.on_device->heads.empty());  // which ones are wanted is a matter of the copies
    CHECK(rows.n_rows_brought() == 2);
    CHECK(plan.is_direct(rows));
    CHECK_FALSE(plan.layers().back().on_device);
}

TEST_CASE("capture_plan: a device reduces heads, of those that are chosen only") {
    for (const auto reduce : {row_reduction::mean_heads, row_reduction::max_heads}) {
        const auto plan = on_device(on_devices, reduce, indices{{3, 0}}, row_type::f16);
        const auto& want = plan.layers().front().on_device;
        REQUIRE(want);
        CHECK(want->reduce == reduce);
        CHECK(want->heads == std::vector{0, 3});
        CHECK(want->type == row_type::f16);
        CHECK(plan.layers().front().n_rows_brought() == 1);
        CHECK(plan.is_direct(plan.layers().front()));
    }
    const auto all = on_device(on_devices, row_reduction::max_heads, indices{{3, 1, 0, 2}});
    CHECK(all.layers().front().on_device->heads.empty());
}

TEST_CASE("capture_plan: a device joins its layers, and the k largest values are the host's") {
    const auto mean = on_device(on_devices, row_reduction::mean);
    CHECK(mean.layers()[0].on_device->layers == std::vector{0, 1});
    CHECK(mean.layers()[0].on_device == mean.layers()[1].on_device);
    CHECK(mean.layers()[0].n_rows_brought() == 0);
    CHECK_FALSE(mean.is_direct(mean.layers()[0]));  // the host's layer is still to come
    const auto top = on_device(on_devices, row_reduction::mean_heads, {}, row_type::f16, 3);
    CHECK(top.layers()[0].on_device->reduce == row_reduction::mean_heads);
    CHECK(top.layers()[0].on_device->type == row_type::f32);
    CHECK_FALSE(top.is_direct(top.layers()[0]));
}

TEST_CASE("capture_plan: where one device cannot reduce, the host joins and converts") {
    const auto heads = on_device(partly_reducible, row_reduction::max_heads, {}, row_type::f16);
    CHECK(heads.layers()[0].on_device->reduce == row_reduction::max_heads);
    CHECK(heads.layers()[1].on_device->reduce == row_reduction::none);
    for (const auto& rows : heads.layers()) {
        CHECK(rows.on_device->type == row_type::f32);
        CHECK_FALSE(heads.is_direct(rows));
    }
    const auto all = on_device(partly_reducible, row_reduction::mean);
    CHECK(all.layers()[0].on_device->reduce == row_reduction::mean_heads);
    CHECK_FALSE(all.layers()[0].on_device->joins_layers());
    CHECK(all.layers()[1].n_rows_brought() == 4);
}

TEST_CASE("graph_plan: what devices are asked for is there once, in one order") {
    const auto whole = on_device(on_devices, row_reduction::none, indices{{1}});
    const auto mean = on_device(on_devices, row_reduction::mean_heads, indices{{0, 1}});
    graph_plan one;
    graph_plan other;
    one.add(whole);
    one.add(mean);
    one.add(whole);
    other.add(mean);
    other.add(on_device(on_devices, row_reduction::none));
    CHECK(one == other);
    CHECK(one.device_wants(0).size() == 2);
    CHECK(one.device_wants(2).empty());
    CHECK(one.wants(0, row_kind::logits));
    CHECK(one.wants(2, row_kind::logits));
    CHECK_FALSE(one.wants(0, row_kind::probs));
    other.add(on_device(on_devices, row_reduction::mean_heads, indices{{0, 2}}));
    CHECK_FALSE(one == other);
}

TEST_CASE("graph_plan: devices compute the slots from the first to the last that captures") {
    const auto rows = on_device(on_devices, row_reduction::none);
    graph_plan one;
    CHECK(one.slots().count == 0);
    one.add(rows, false, 3);
    CHECK(one.slots() == kqview::slot_range{3, 1});
    graph_plan other = one;
    other.add(rows, false, 1);
    CHECK(other.slots() == kqview::slot_range{1, 3});
    CHECK(other.has_nodes_of(one));
    CHECK(other.slots().covers(one.slots()));
    CHECK_FALSE(one.slots().covers(other.slots()));
    CHECK_FALSE(one == other);
    other.add(rows, true, 1);
    CHECK_FALSE(other.has_nodes_of(one));
    CHECK(kqview::common_of({2, 4}, {0, 3}) == kqview::slot_range{2, 1});
    CHECK(kqview::common_of({5, 2}, {0, 3}).count == 0);
    graph_plan on_host;  // whose kernel finds the slots of a step by itself
    on_host.add(make(indices{{0}}, {}), false, 5);
    CHECK(on_host.slots().count == 0);
}
