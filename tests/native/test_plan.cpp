// capture_plan and graph_plan: which rows, in which order, what is refused.
#include <doctest/doctest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
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

std::string refusal_of(const indices& layers, const indices& heads) {
    try {
        make(layers, heads);
    } catch (const kqview::error& failure) {
        CHECK(failure.code() == kqview::errc::invalid_capture);
        return failure.what();
    }
    return {};
}

bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
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

TEST_CASE("capture_plan: find knows captured layers and no others") {
    const auto plan = make(indices{{9, 2}}, {});
    REQUIRE(plan.find(9));
    CHECK(plan.find(9)->il == 9);
    CHECK(plan.find(2)->first_row == 4);
    for (const int il : {0, 1, 3, 8, 10, 1000}) CHECK(plan.find(il) == nullptr);
}

TEST_CASE("capture_plan: bytes are rows by queries by columns by element size") {
    CHECK(make(indices{{0}}, {}).layout(7).size_bytes == 4 * 7 * 4);
    CHECK(make(indices{{0}}, {}, row_kind::probs, row_type::f16).layout(7).size_bytes == 4 * 7 * 2);
    CHECK(make(indices{{0}}, {}).layout(7, 5).size_bytes == 4 * 5 * 7 * 4);
}

TEST_CASE("capture_plan: reductions leave a row a layer, or one") {
    CHECK(make(row_reduction::none, 0).n_rows() == 14);
    for (const auto reduce : {row_reduction::mean_heads, row_reduction::max_heads})
        CHECK(make(reduce, 0).n_rows() == 4);
    for (const auto reduce : {row_reduction::mean, row_reduction::max}) {
        CHECK(make(reduce, 0).n_rows() == 1);
        CHECK(make(reduce, 0).n_heads_total() == 14);
        CHECK(make(reduce, 0).layout(7, 5).size_bytes == 5 * 7 * 4);
    }
}

TEST_CASE("capture_plan: the largest values come with their positions, never more than columns") {
    const auto plan = make(row_reduction::mean_heads, 3);
    const auto layout = plan.layout(7, 5);
    CHECK(layout.n_values == 3);
    CHECK(layout.positions_offset >= 4 * 5 * 3 * 4);
    CHECK(layout.positions_offset % 64 == 0);
    CHECK(layout.size_bytes == layout.positions_offset + 4 * 5 * 3 * 4);
    CHECK(plan.layout(2).n_values == 2);
}

TEST_CASE("capture_plan: hidden states lie behind the rows of a single query") {
    const auto plan = make(row_reduction::mean, 0, {3, 1});
    const auto layout = plan.layout(7);
    REQUIRE(layout.has_hidden);
    CHECK(layout.hidden_offset >= 7 * 4);
    CHECK(layout.size_bytes == layout.hidden_offset + 2 * 24 * 4);
    CHECK(plan.find_hidden(1) == 1);
    CHECK(plan.find_hidden(0) == -1);
    CHECK_FALSE(plan.layout(7, 5, false).has_hidden);
}

TEST_CASE("capture_plan: hidden states go without attention, and unknown ones are refused") {
    capture_options options;
    options.layers.emplace();
    options.hidden = {2};
    const capture_plan plan(options, available);
    CHECK(plan.n_rows() == 0);
    CHECK(plan.layout(7).size_bytes == 24 * 4);
    options.hidden = {9};
    CHECK_THROWS_WITH(capture_plan(options, available),
                      doctest::Contains("layer 9 has no hidden state here"));
}

TEST_CASE("capture_plan: a layer without attention is refused with those that have it") {
    const auto text = refusal_of(indices{{0, 1}}, {});
    CHECK(contains(text, "layer 1"));
    CHECK(contains(text, "0, 2, 3, 9"));
    CHECK(contains(refusal_of(indices{{-1}}, {}), "layer -1"));
}

TEST_CASE("capture_plan: a head that one of the layers does not have is refused") {
    const auto text = refusal_of(indices{{0, 3}}, indices{{2}});
    CHECK(contains(text, "head 2"));
    CHECK(contains(text, "layer 3"));
    CHECK(contains(text, "0..1"));
    CHECK(contains(refusal_of(indices{{0}}, indices{{-1}}), "head -1"));
}

TEST_CASE("capture_plan: empty lists, repeated layers and models without attention are refused") {
    CHECK(contains(refusal_of(indices{std::vector<int>{}}, {}), "no layers or no heads"));
    CHECK(contains(refusal_of({}, indices{std::vector<int>{}}), "no layers or no heads"));
    CHECK(contains(refusal_of(indices{{2, 0, 2}}, {}), "layer 2 is named twice"));
    CHECK_THROWS_AS(capture_plan({}, {}), kqview::error);
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
