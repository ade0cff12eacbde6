// grammar_filter: what bounds it. What it allows is compared with llama.cpp's matcher in
// test_grammar_llama.cpp.
#include <doctest/doctest.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "sample/grammar.h"
#include "sample/grammar_filter.h"
#include "sample/work_limit.h"

using namespace kqview;

namespace {

const std::string spaces(64, ' ');
constexpr token_id end_id = 0;
constexpr token_id long_id = 1;  // 64 spaces; the characters follow
constexpr token_id first_char = 2;

std::shared_ptr<const token_texts> make_texts() {
    std::vector<std::string> texts{"</s>", spaces};
    for (char c = ' '; c < '\x7f'; ++c) texts.emplace_back(1, c);
    std::vector<bool> is_end(texts.size());
    is_end[end_id] = true;
    return std::make_shared<const token_texts>(texts, is_end);
}

token_id id_of(char c) { return first_char + (c - ' '); }

std::shared_ptr<const grammar> read(std::string_view text, double limit_s = 60) {
    work_limit limit("generate: grammar", limit_s);
    limit.restart();
    return std::make_shared<const grammar>(
        read_grammar(text, [](auto) { return std::nullopt; }, limit));
}

template <typename call>
std::optional<errc> code_of(call&& run) {
    try {
        run();
    } catch (const error& failure) {
        return failure.code();
    }
    return {};
}

struct fixture {
    explicit fixture(std::string_view text, double limit_s = 60)
        : limit("generate: grammar", limit_s), filter(make_texts(), read(text), unbounded()) {
        limit.restart();
    }
    static work_limit& unbounded() {
        static work_limit none("generate: grammar", std::numeric_limits<double>::infinity());
        return none;
    }
    bool allows(token_id id) { return filter.allows(id, limit); }
    void accept(token_id id) { filter.accept(id, limit); }

    work_limit limit;
    grammar_filter filter;
};

}  // namespace

TEST_CASE("grammar_filter: exponentially many readings of one token take states in its length") {
    fixture one("root ::= s\ns ::= \" \" s \"x\" | \" \" s \"y\" | \" \"");
    one.filter.prepare(1000, one.limit);
    CHECK(one.allows(long_id));
    CHECK(one.allows(id_of(' ')));
    CHECK_FALSE(one.allows(id_of('x')));
    CHECK_FALSE(one.allows(end_id));
    one.accept(long_id);
    for (int i = 0; i < 63; ++i) {
        CHECK_FALSE(one.allows(end_id));
        REQUIRE(one.allows(id_of('x')));
        one.accept(id_of(i % 2 == 0 ? 'x' : 'y'));
    }
    CHECK(one.allows(end_id));
    CHECK_FALSE(one.allows(id_of('x')));
    CHECK(one.filter.automaton().n_states() < 1000);
}

TEST_CASE("grammar_filter: spent time ends a call with invalid_sampling") {
    // Readings of every length begin at every character.
    fixture one(
        "root ::= (a \"x\")+\na ::= \" \" a a | \" \" a | \" \" | a2 a2\na2 ::= [ ]{0,500} [x]?",
        0.0);
    CHECK(code_of([&] { one.filter.prepare(1000, one.limit); }) == errc::invalid_sampling);
}

TEST_CASE("grammar_filter: stop ends a call of another thread") {
    fixture one("root ::= [ ]{0,2000} [ ]{0,2000}");
    one.limit.stop();
    CHECK(code_of([&] {
              for (int i = 0; i < 1000; ++i) one.accept(long_id);
          }) == errc::invalid_sampling);
}

TEST_CASE("grammar_filter: depth costs memory that is given back, and nothing is forgotten") {
    fixture one("root ::= \"(\" root \")\" | [a-z]");
    constexpr int depth = 300'000;
    for (int i = 0; i < depth; ++i) one.accept(id_of('('));
    CHECK(one.filter.automaton().n_forgotten() > 0);
    one.accept(id_of('q'));
    for (int i = 0; i < depth; ++i) {
        if (i % 1000 == 0) CHECK_FALSE(one.allows(end_id));
        one.accept(id_of(')'));
    }
    CHECK(one.allows(end_id));
    CHECK_FALSE(one.allows(id_of(')')));
}

TEST_CASE("grammar: recursion that grows a stack without a character is refused") {
    for (const char* text :
         {"root ::= root \"a\" | \"b\"", "root ::= a\na ::= b \"x\" | \"y\"\nb ::= a",
          "root ::= a root \"x\" | \"y\"\na ::= b\nb ::= \"\" | \"z\""}) {
        CAPTURE(text);
        CHECK(code_of([&] { read(text); }) == errc::invalid_sampling);
    }
}

TEST_CASE("grammar: recursion in tail position needs no character") {
    fixture one("root ::= (a? b?)*\na ::= c | \"a\"\nb ::= \"b\"\nc ::= a | \"c\"");
    for (const char c : {'a', 'b', 'b', 'c', 'a'}) {
        REQUIRE(one.allows(id_of(c)));
        one.accept(id_of(c));
        CHECK(one.allows(end_id));
    }
}

TEST_CASE("grammar: what is too large or takes too long to read is refused") {
    CHECK(code_of([] { read("root ::= \"" + std::string(1 << 20, 'a') + "\""); }) ==
          errc::invalid_sampling);
    std::string deep = "root ::= ";
    deep += std::string(300, '(') + "\"a\"" + std::string(300, ')');
    CHECK(code_of([&] { read(deep); }) == errc::invalid_sampling);
    std::string repeated = "root ::= ";
    for (int i = 0; i < 300; ++i) repeated += "\"abcd\"{2000} ";
    CHECK(code_of([&] { read(repeated); }) == errc::invalid_sampling);
    CHECK(code_of([] { read("root ::= \"" + std::string(900'000, 'a') + "\"", 0.0); }) ==
          errc::invalid_sampling);
    // A chain as long as the text allows is read without recursion.
    std::string chain = "root ::= a0\n";
    for (int i = 0; i < 50'000; ++i) {
        chain += 'a' + std::to_string(i) + " ::= a" + std::to_string(i + 1) + '\n';
    }
    CHECK(read(chain + "a50000 ::= \"x\"")->members.size() > 50'000);
}

TEST_CASE("work_limit: what is used comes back slowly, up to the limit") {
    work_limit limit("generate: grammar", 0.05, 0.01);
    const auto work = [&](double duration_s) {
        limit.restart();
        const double start_s = thread_cpu_s();
        while (thread_cpu_s() - start_s < duration_s) {
        }
        limit.check();
        limit.pause();
    };
    work(0.03);  // 0.02 s are left
    CHECK(code_of([&] { work(0.04); }) == errc::invalid_sampling);
    work_limit rested("generate: grammar", 0.05, 0.01);
    for (int i = 0; i < 100; ++i) {
        rested.restart();
        rested.pause();
    }
    rested.restart();
    CHECK_NOTHROW(rested.check());
}
