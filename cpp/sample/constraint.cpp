#include "sample/constraint.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/ids.h"

namespace kqview {
namespace {

using clock = process_socket::clock;

constexpr std::size_t n_text_bytes_max = std::size_t{1} << 20;
// The longest wait for an answer. The limits on CPU time end it sooner, unless the machine is busy.
constexpr std::chrono::seconds answer_limit{60};
// What is spent on a constraint that takes less is no reason to refuse it.
constexpr std::int64_t small_bytes = std::int64_t{16} << 20;
// While more tokens than this are left, none is checked for whether the output can be ended.
constexpr int n_watched = 1024;
// Steps of constraint_child.py.
enum class step : std::uint32_t { add, add_anew, settle };

// The caller's option for a kind of constraint.
std::string option_of(const std::string& kind) { return kind == "lark" ? "grammar" : kind; }

// Why llguidance refuses a constraint or cannot go on with it, and the remedy; follows the
// constraint's name.
std::string refusal(std::string_view message, bool is_new) {
    if (message.find("coerce_one_of") != std::string_view::npos) {
        return " has a oneOf in which one value may fit several schemas, which llguidance refuses; "
               "make the schemas exclude each other, write anyOf, or add "
               R"("x-guidance": {"coerce_one_of": true} to the whole schema, which is the same)";
    }
    if (message.find("Unimplemented keys") != std::string_view::npos) {
        return " is refused by llguidance: " + std::string(message) +
               R"(; leave them out, or add "x-guidance": {"lenient": true} to the whole schema, )"
               "which does not hold the output to them";
    }
    if (is_new && message.starts_with("NoExtension")) return " matches no output; correct it";
    // Rust's own words help nobody who wrote a schema.
    if (message.starts_with("panic")) return " makes llguidance fail; simplify it";
    return (is_new ? " is refused by llguidance; correct it: "
                   : " cannot be followed further by llguidance; simplify it: ") +
           std::string(message);
}

// Why a process ended without an answer; follows the constraint's name.
std::string reason_of(constraint_host::cause why, double cpu_s) {
    using enum constraint_host::cause;
    char figures[80];
    switch (why) {
        case cpu_time:
            std::snprintf(figures, sizeof figures, "more than %.0f s of CPU time, the limit",
                          cpu_s);
            break;
        case depth: return " is nested too deeply for llguidance; make it flatter";
        case memory:
            std::snprintf(figures, sizeof figures, "more than %zu MiB of memory, the limit",
                          constraint_host::memory_bytes >> 20);
            break;
        default: return " makes llguidance fail; simplify it";
    }
    return std::string(" takes llguidance ") + figures + "; simplify it";
}

// A child that ends with this.
class held_child {
public:
    explicit held_child(std::shared_ptr<constraint_host> host)
        : host_(std::move(host)), child_(host_->open()) {}
    ~held_child() { host_->drop(child_.number); }

    constraint_host& host() const { return *host_; }
    const process_socket& socket() const { return child_.socket; }
    constraint_host::cause end() { return host_->end(child_.number); }

private:
    const std::shared_ptr<constraint_host> host_;
    const constraint_host::child child_;
};

class constraint final : public token_filter {
public:
    constraint(std::shared_ptr<constraint_host> host, const std::string& kind,
               const std::string& text, const stop_flag& unwanted, int n_closed)
        : kind_(option_of(kind)), n_closed_(n_closed), child_(std::move(host)) {
        const std::array<std::uint32_t, 2> sizes{static_cast<std::uint32_t>(kind.size()),
                                                 static_cast<std::uint32_t>(text.size())};
        std::string words(reinterpret_cast<const char*>(sizes.data()), sizeof sizes);
        words += kind;
        words += text;
        const auto is_stopped = [&] { return unwanted.load(std::memory_order_relaxed); };
        send(words, is_stopped);
        receive(is_stopped);
    }

    ~constraint() override { child_.host().n_bytes() -= n_bytes_; }

    bool matches_nothing() const {
        return std::all_of(mask_.begin(), mask_.end(),
                           [](std::uint32_t word) { return word == 0; });
    }

    void prepare(std::size_t /*n_calls*/, work_limit& limit) override {
        const auto is_stopped = [&] { return limit.is_stopped(); };
        while (!is_current_) {
            if (!is_due_) request_mask(is_stopped);
            limit.charge(receive(is_stopped));
        }
        limit.check();
    }

    bool allows(token_id id, work_limit& /*limit*/) override {
        const auto i = static_cast<std::uint32_t>(id);
        return (mask_[i / 32] >> (i % 32) & 1U) != 0;
    }

    token_id settle(token_id id, work_limit& limit) override {
        const int n_left = n_closed_ - n_accepted_;
        if (n_left <= 0 || n_left > n_watched || child_.host().is_end(id)) return id;
        const auto is_stopped = [&] { return limit.is_stopped(); };
        request(step::settle, {static_cast<std::uint32_t>(id), static_cast<std::uint32_t>(n_left)},
                is_stopped);
        limit.charge(receive(is_stopped));
        limit.check();
        const bool is_token =
            settled_ >= 0 && settled_ < static_cast<token_id>(child_.host().n_vocab());
        return is_token ? settled_ : id;
    }

    // The mask of what may follow is computed from here on, beside the token's own computation.
    void accept(token_id id, work_limit& limit) override {
        is_current_ = false;
        // Nothing follows an end token, and llguidance rejects it where nothing else may come.
        if (child_.host().is_end(id)) return;
        accepted_.push_back(static_cast<std::uint32_t>(id));
        ++n_accepted_;
        if (!is_due_) request_mask([&] { return limit.is_stopped(); });
    }

    void restart() override {
        is_current_ = false;
        is_anew_ = true;
        accepted_.clear();
        n_accepted_ = 0;
    }

private:
    void request_mask(const std::function<bool()>& is_stopped) {
        request(is_anew_ ? step::add_anew : step::add, std::exchange(accepted_, {}), is_stopped);
        is_anew_ = false;
    }

    void request(step kind, std::vector<std::uint32_t> words,
                 const std::function<bool()>& is_stopped) {
        const auto n_words = static_cast<std::uint32_t>(words.size());
        words.insert(words.begin(), {static_cast<std::uint32_t>(kind), n_words});
        send({reinterpret_cast<const char*>(words.data()), words.size() * sizeof(std::uint32_t)},
             is_stopped);
    }

    void send(const std::string& words, const std::function<bool()>& is_stopped) {
        is_due_ = child_.socket().send(words.data(), words.size(), clock::now() + answer_limit,
                                       is_stopped);
        if (!is_due_) raise_ended(is_stopped);
    }

    // Takes the answer that is due: a settled token; or a mask, of the last token unless others
    // were accepted since. Returns the CPU time that it took.
    double receive(const std::function<bool()>& is_stopped) {
        struct {
            char kind;
            std::uint32_t cpu_us, grown_kib, n_bytes;
        } head{};
        const auto until = clock::now() + answer_limit;
        if (!child_.socket().receive(&head, sizeof head, until, is_stopped))
            raise_ended(is_stopped);
        std::string body;
        if (head.kind == 'm') mask_.resize(head.n_bytes / sizeof(std::uint32_t));
        if (head.kind != 'm') body.resize(head.n_bytes);
        void* const place = head.kind == 'm' ? static_cast<void*>(mask_.data()) : body.data();
        if (!child_.socket().receive(place, head.n_bytes, until, is_stopped))
            raise_ended(is_stopped);
        is_due_ = false;
        if (head.kind == 't' && body.size() == sizeof settled_) {
            std::memcpy(&settled_, body.data(), sizeof settled_);
            return head.cpu_us * 1e-6;
        }
        if (head.kind != 'm') {
            throw error(errc::invalid_sampling, kind_ + refusal(body, !has_mask_));
        }
        has_mask_ = true;
        is_current_ = !is_anew_ && accepted_.empty();
        count(std::int64_t{head.grown_kib} << 10);
        return head.cpu_us * 1e-6;
    }

    // All constraints together have a limit too, which the growing ones meet.
    void count(std::int64_t n_bytes) {
        const auto n_all = child_.host().n_bytes() += n_bytes - n_bytes_;
        n_bytes_ = n_bytes;
        if (n_bytes > small_bytes && n_all > std::int64_t{constraint_host::all_memory_bytes}) {
            throw error(errc::invalid_sampling, kind_, " takes llguidance ", n_bytes >> 20,
                        " MiB, and those of all requests ", n_all >> 20,
                        " MiB; simplify it, or retry later");
        }
    }

    [[noreturn]] void raise_ended(const std::function<bool()>& is_stopped) {
        if (is_stopped()) {
            throw error(errc::invalid_sampling, kind_, ": its request has ended");
        }
        const double cpu_s =
            has_mask_ ? constraint_host::step_cpu_s : constraint_host::compile_cpu_s;
        throw error(errc::invalid_sampling, kind_ + reason_of(child_.end(), cpu_s));
    }

    const std::string kind_;
    const int n_closed_;
    held_child child_;
    std::int64_t n_bytes_ = 0;  // the memory of its process

    std::vector<std::uint32_t> mask_;      // one bit per token
    std::vector<std::uint32_t> accepted_;  // and not sent yet
    int n_accepted_ = 0;                   // sent or not
    token_id settled_ = 0;
    bool is_anew_ = false;     // they follow nothing
    bool is_due_ = false;      // an answer is on its way
    bool has_mask_ = false;    // the text has been compiled
    bool is_current_ = false;  // mask_ is of what may follow now
};

}  // namespace

std::unique_ptr<token_filter> make_constraint(std::shared_ptr<constraint_host> host,
                                              const std::string& kind, const std::string& text,
                                              const stop_flag& unwanted, int n_closed) {
    const std::string option = option_of(kind);
    if (text.size() > n_text_bytes_max) {
        throw error(errc::invalid_sampling, option, " has ", text.size(), " bytes, the limit is ",
                    n_text_bytes_max, "; shorten it");
    }
    if (text.find('\0') != std::string::npos) {
        throw error(errc::invalid_sampling, option, " contains a zero byte; leave it out");
    }
    auto made = std::make_unique<constraint>(std::move(host), kind, text, unwanted, n_closed);
    if (made->matches_nothing()) {
        throw error(errc::invalid_sampling, option, " matches no output; correct it");
    }
    return made;
}

}  // namespace kqview
