// slot_state: the table of transitions, whole.
#include <doctest/doctest.h>

#include <array>
#include <set>
#include <string>
#include <utility>

#include "sched/slot_state.h"

using kqview::slot_state;

namespace {

constexpr std::array all{slot_state::idle, slot_state::prefill, slot_state::decode,
                         slot_state::paused, slot_state::starved};

// idle starts with a prompt; a generating slot does not go back to its prompt.
const std::set<std::pair<slot_state, slot_state>> illegal{
    {slot_state::idle, slot_state::idle},       {slot_state::idle, slot_state::decode},
    {slot_state::idle, slot_state::paused},     {slot_state::idle, slot_state::starved},
    {slot_state::prefill, slot_state::prefill}, {slot_state::decode, slot_state::prefill},
};

}  // namespace

TEST_CASE("slot_state: exactly the transitions of the table are legal") {
    for (const auto from : all) {
        for (const auto to : all) {
            CAPTURE(kqview::name_of(from));
            CAPTURE(kqview::name_of(to));
            CHECK(kqview::may_follow(from, to) == !illegal.contains({from, to}));
        }
    }
}

TEST_CASE("slot_state: change follows the table and names both states when it refuses") {
    for (const auto from : all) {
        for (const auto to : all) {
            CAPTURE(kqview::name_of(from));
            CAPTURE(kqview::name_of(to));
            auto state = from;
            if (from == to || kqview::may_follow(from, to)) {
                CHECK_NOTHROW(kqview::change(state, to));
                CHECK(state == to);
                continue;
            }
            try {
                kqview::change(state, to);
                FAIL_CHECK("no error");
            } catch (const kqview::error& failure) {
                const std::string text = failure.what();
                CHECK(failure.code() == kqview::errc::internal);
                CHECK(text.find(kqview::name_of(from)) != std::string::npos);
                CHECK(text.find(kqview::name_of(to)) != std::string::npos);
            }
            CHECK(state == from);
        }
    }
}

TEST_CASE("slot_state: every state has its own name") {
    std::set<std::string> names;
    for (const auto state : all) names.insert(kqview::name_of(state));
    CHECK(names.size() == all.size());
    CHECK_FALSE(names.contains("?"));
}
