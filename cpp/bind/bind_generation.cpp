// The consumer's side of a request: taking events, waiting, and the end.
#include "bind/bind_generation.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/fork_guard.h"
#include "base/ids.h"
#include "base/per_thread.h"
#include "base/system.h"
#include "bind/bind.h"
#include "sample/logit_scan.h"
#include "sample/token_picker.h"
#include "sched/forward_pass.h"
#include "sched/mailbox.h"
#include "sched/wakeup.h"
#include "tap/edits.h"

namespace kqview::bind {

namespace {

constexpr std::array reason_names{"stop", "length", "stop_token", "cancelled", "error"};
static_assert(reason_names.size() == static_cast<std::size_t>(finish_reason::error) + 1);

const char* name_of(finish_reason reason) { return reason_names[static_cast<std::size_t>(reason)]; }

// Two threads that take at once would split the text between them.
class single_consumer {
public:
    explicit single_consumer(generation_handle& handle) : taken_(handle.is_taken) {
        if (taken_.exchange(true)) {
            throw error(errc::busy,
                        "another thread or task already iterates this generation; iterate it once");
        }
    }
    ~single_consumer() { taken_.store(false); }
    single_consumer(const single_consumer&) = delete;
    single_consumer& operator=(const single_consumer&) = delete;

private:
    std::atomic<bool>& taken_;
};

// The result of next(). Rows become arrays on demand.
struct taken_token {
    token_event token;
    std::optional<end_event> end;  // with the last token
};

// A forward pass for the consumer to answer. Mods may keep it: neither the generation nor the
// engine lives for its sake.
struct taken_pass {
    forward_event event;
    std::weak_ptr<engine> core;
    std::weak_ptr<request> wanted;

    // `act` runs without the GIL. Raises closed if the generation is gone.
    template <typename Act>
    auto with(Act act) const {
        const auto owner = core.lock();
        const auto of = wanted.lock();
        if (!owner || !of) throw error(errc::closed, "the generation of this forward pass is gone");
        owner->sched().check_not_forked();
        const nb::gil_scoped_release release;
        return act(*owner, of);
    }
};

picked_token pick(const taken_pass& self, const nb::object& logits,
                  std::optional<float> temperature) {
    const auto adjusted = logits.is_none() ? read_values{} : values_of("logits", logits);
    return self.with([&](engine&, const std::shared_ptr<request>& of) {
        return self.event.pass->pick(*of, adjusted.values, temperature);
    });
}

std::pair<std::vector<std::pair<token_id, float>>, double> outlook(const nb::object& logits,
                                                                   int n_top) {
    const auto read = values_of("logits", logits);
    const nb::gil_scoped_release release;  // `read` keeps the array
    logprob_scan scan;
    scan.read(read.values.data(), static_cast<std::int32_t>(read.values.size()), n_top);
    return {scan.top(), scan.entropy()};
}

const char* ends(const taken_pass& self, token_id id) {
    const auto reason = self.with(
        [&](engine& core, const std::shared_ptr<request>& of) { return core.end_by(*of, id); });
    return reason ? name_of(*reason) : nullptr;
}

finish_reason reason_named(const std::string& name) {
    using enum finish_reason;
    for (const auto reason : {stop, length, stop_token, error}) {
        if (name == name_of(reason)) return reason;
    }
    throw kqview::error(errc::request, "end is '", name,
                        "', allowed are 'stop', 'length', 'stop_token', 'error' and None; to "
                        "cancel, close the generation");
}

void answer(const taken_pass& self, int n_removed, std::vector<token_id> ids,
            const std::optional<std::string>& end, const edit_plan* edits) {
    pass_answer given{n_removed, std::move(ids), {}};
    if (end) given.end = reason_named(*end);
    self.with([&](engine& core, const std::shared_ptr<request>& of) {
        if (edits) {
            given.edits = std::make_shared<const edit_plan>(plan_for(core.facts().capture, *edits));
        }
        core.answer(of, *self.event.pass, std::move(given));
    });
}

// Nothing has arrived yet.
struct wait_event {
    std::vector<request_id> holders;
};

nb::object to_python(generation_handle& self, mailbox::item item) {
    if (item.end && !self.end) self.end = item.end;
    if (item.prompt) return nb::cast(std::move(*item.prompt));
    if (item.forward) return nb::cast(taken_pass{std::move(*item.forward), self.core, self.wanted});
    if (item.token) return nb::cast(taken_token{std::move(*item.token), std::move(item.end)});
    if (item.end->failure) throw *item.end->failure;
    return nb::cast(std::move(*item.end));
}

// The wake handle for this thread's waits. A forked child gets its own: it shares the parent's
// descriptor.
const std::shared_ptr<wake_handle>& waiter_of_thread() {
    struct waiter {
        fork_guard fork;
        std::shared_ptr<wake_handle> handle = std::make_shared<wake_handle>();
    };
    auto& mine = per_thread<std::optional<waiter>>();
    if (!mine || mine->fork.is_forked()) mine.emplace();
    return mine->handle;
}

// Python's share of a wake handle. The engine thread drops its own share when it wakes a consumer:
// releasing a shared_ptr that nanobind made from a Python object would take the GIL for that.
struct shared_waiter {
    std::shared_ptr<wake_handle> handle = std::make_shared<wake_handle>();
};

using clock = std::chrono::steady_clock;
constexpr int look_ms = 100;
constexpr double longest_wait_s = 365.0 * 24 * 3600;  // well within the clock's range

int milliseconds_until(const std::optional<clock::time_point>& deadline) {
    if (!deadline) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline - clock::now());
    return static_cast<int>(
        std::clamp<std::int64_t>(left.count(), 0, std::numeric_limits<int>::max()));
}

// Sleeps without the GIL until signalled. If a signal handler raises, the sleep ends.
void sleep_on(generation_handle& self, wake_handle& waiter, int timeout_ms) {
    wait_end end{};
    {
        const nb::gil_scoped_release release;
        end = waiter.wait(timeout_ms);
        stay_if_exiting();
    }
    if (end == wait_end::interrupted && PyErr_CheckSignals() != 0) {
        self.wanted->box->disarm(&waiter);
        throw nb::python_error();
    }
}

// The next event; or the reason for waiting, after `wait_s`, or at once if that reason is new.
nb::object next_item(generation_handle& self, std::optional<double> wait_s, bool goes_on) {
    self.core->sched().check_not_forked();
    const single_consumer guard(self);
    auto& box = *self.wanted->box;
    const auto& waiter = waiter_of_thread();
    if (!goes_on && self.wanted->slot.load() < 0) box.forget_stall();
    std::optional<clock::time_point> deadline;
    if (wait_s) {
        const std::chrono::duration<double> wait(std::clamp(*wait_s, 0.0, longest_wait_s));
        deadline = clock::now() + std::chrono::duration_cast<clock::duration>(wait);
    }
    for (;;) {
        if (auto item = box.try_take()) return to_python(self, std::move(*item));
        if (auto holders = box.take_stall(); !holders.empty())
            return nb::cast(wait_event{std::move(holders)});
        const int left_ms = milliseconds_until(deadline);
        if (left_ms == 0) {
            box.disarm(waiter.get());
            return nb::cast(wait_event{});
        }
        waiter->drain();
        if (!box.arm(waiter)) sleep_on(self, *waiter, left_ms);
    }
}

// As next_item, without waiting.
nb::object try_next_item(generation_handle& self, bool goes_on) {
    self.core->sched().check_not_forked();
    const single_consumer guard(self);
    auto& box = *self.wanted->box;
    if (auto item = box.try_take()) return to_python(self, std::move(*item));
    if (!goes_on && self.wanted->slot.load() < 0) box.forget_stall();
    return nb::cast(wait_event{box.take_stall()});
}

void wait_settled(generation_handle& self) {
    const auto& waiter = waiter_of_thread();
    for (;;) {
        if (self.core->sched().is_forked()) return;
        waiter->drain();
        if (self.wanted->box->arm_settled(waiter)) return;
        sleep_on(self, *waiter, -1);
    }
}

const token_event& choice_of(const taken_token& event) { return event.token; }
const picked_token& choice_of(const picked_token& picked) { return picked; }

// An id with what comes beside it.
template <typename Choice>
void bind_choice(nb::class_<Choice>& bound) {
    const auto if_asked = [](const Choice& self, const auto& value) {
        return std::isnan(choice_of(self).logprob) ? std::nullopt : std::optional(value);
    };
    bound.def_prop_ro("id", [](const Choice& self) { return choice_of(self).id; })
        .def_prop_ro("logprob",
                     [=](const Choice& self) { return if_asked(self, choice_of(self).logprob); })
        .def_prop_ro(
            "top_logprobs", [=](const Choice& self) { return if_asked(self, choice_of(self).top); },
            "None unless logprobs were requested, like logprob.");
}

template <auto Member>
auto usage(const end_event& self) {
    return self.usage.*Member;
}

const captured_rows& rows_of(const taken_token& event) { return event.token.rows; }
const captured_rows& rows_of(const taken_pass& event) { return event.event.rows; }
const captured_rows& rows_of(const prompt_event& event) { return event.rows; }

template <auto View, typename Event>
nb::object view(const Event& self) {
    return View(rows_of(self), std::is_same_v<Event, prompt_event>);
}

// A class of events with rows, whose arrays are views.
template <typename Event>
nb::class_<Event> bind_rows(nb::module_& module, const char* name, const char* doc) {
    return nb::class_<Event>(module, name, doc)
        .def_prop_ro("attention", &view<attention_view, Event>,
                     nb::sig("def attention(self) -> typing.Any"))
        .def_prop_ro("positions", &view<positions_view, Event>,
                     nb::sig("def positions(self) -> typing.Any"))
        .def_prop_ro("hidden", &view<hidden_view, Event>, nb::sig("def hidden(self) -> typing.Any"))
        .def_prop_ro(
            "written_at",
            [](const Event& self) {
                return reinterpret_cast<std::uintptr_t>(rows_of(self).written_at);
            },
            "For tests: the address to which the CPU wrote the first row; 0 without one.");
}

void bind_events(nb::module_& module) {
    nb::class_<end_event>(module, "EndEvent", "The end of a request.")
        .def_prop_ro("finish_reason", [](const end_event& self) { return name_of(self.reason); })
        .def_prop_ro("prompt_tokens", &usage<&request_usage::prompt_tokens>)
        .def_prop_ro("cached_tokens", &usage<&request_usage::cached_tokens>)
        .def_prop_ro("draft_tokens", &usage<&request_usage::draft_tokens>)
        .def_prop_ro("accepted_tokens", &usage<&request_usage::accepted_tokens>)
        .def_prop_ro("queue_s", &usage<&request_usage::queue_s>)
        .def_prop_ro("prefill_s", &usage<&request_usage::prefill_s>)
        .def_prop_ro("decode_s", &usage<&request_usage::decode_s>);

    auto token =
        bind_rows<taken_token>(module, "TokenEvent", "A generated token; its rows are views.");
    bind_choice(token);
    token
        .def_prop_ro(
            "logits", [](const taken_token& self) { return logits_view(self.token.rows); },
            nb::sig("def logits(self) -> typing.Any"))
        .def_prop_ro(
            "n_discarded", [](const taken_token& self) { return self.token.n_discarded; },
            "Number of tokens discarded from the slot before this row.")
        .def_prop_ro(
            "end", [](const taken_token& self) { return self.end ? &*self.end : nullptr; },
            nb::rv_policy::reference_internal, nb::sig("def end(self) -> EndEvent | None"),
            "The end, if this is the last token and no error follows.");

    nb::class_<picked_token> picked(module, "PickedToken", "A choice of a request's own sampler.");
    bind_choice(picked);

    bind_rows<taken_pass>(module, "ForwardEvent",
                          "A forward pass of a steered request, which waits for `answer`.")
        .def_prop_ro(
            "logits", [](const taken_pass& self) { return logits_view(self.event.pass->logits()); },
            nb::sig("def logits(self) -> typing.Any"),
            "Read-only float32 view of shape (n_vocab,), valid for as long as it is held.")
        .def_prop_ro(
            "n_discarded", [](const taken_pass& self) { return self.event.n_discarded; },
            "As in TokenEvent.")
        .def_prop_ro(
            "n_tokens", [](const taken_pass& self) { return self.event.pass->known().n_tokens; },
            "Number of tokens in the slot, all of them evaluated.")
        .def_prop_ro(
            "n_removable",
            [](const taken_pass& self) { return self.event.pass->known().n_removable; },
            "Number of generated ids that can be taken back: all, unless some were discarded.")
        .def_prop_ro(
            "n_left", [](const taken_pass& self) { return self.event.pass->known().n_left; },
            "Number of ids that the generation may still get, by max_tokens and its slot.")
        .def("pick", &pick, nb::arg("logits") = nb::none(), nb::arg("temperature") = nb::none(),
             nb::sig("def pick(self, logits: typing.Any = None, temperature: float | None = None) "
                     "-> PickedToken"),
             "Choose a token as the request would, once, from these or other logits; without the "
             "GIL.\n\nA temperature is for this choice alone, 0 is greedy. Nothing is changed by "
             "it.")
        .def("ends", &ends, nb::arg("id"), nb::sig("def ends(self, id: int) -> str | None"),
             "The finish reason, if this id ends the text instead of becoming part of it.")
        .def("answer", &answer, nb::arg("n_removed") = 0, nb::arg("ids") = std::vector<token_id>{},
             nb::arg("end") = nb::none(), nb::arg("edits") = nb::none(),
             nb::sig("def answer(self, n_removed: int = 0, ids: collections.abc.Sequence[int] = "
                     "[], end: str | None = None, edits: EditPlan | None = None) -> None"),
             "Decide what follows, once; returns at once. `edits` are in force from then "
             "on.\n\nTakes back the last n_removed "
             "generated ids, then appends `ids` as one chunk. Without ids,\nthe last token is "
             "evaluated again. With `end` the text ends there; it also ends before the\nfirst of "
             "`ids` that `ends`, and when nothing is left. Raises without effect: RequestError,\n"
             "InvalidToken, InvalidSampling for an id that the grammar does not allow; ClosedError "
             "once\nthe generation has ended, whose next event says how.");

    module.def("outlook", &outlook, nb::arg("logits"), nb::arg("n_top"),
               nb::sig("def outlook(logits: typing.Any, n_top: int) -> tuple[list[tuple[int, "
                       "float]], float]"),
               "What raw logits say of the next token: the best ids with their logprobs, and the "
               "entropy\nof all in nats. Best first, of equal ones the lower id; ids of logit -inf "
               "are left out.\nOne pass over the row, without the GIL.");

    nb::class_<token_score>(module, "TokenScore", "How the model judged a token of the prompt.")
        .def_ro("logprob", &token_score::logprob)
        .def_ro("rank", &token_score::rank, "Number of tokens that the model preferred.")
        .def_ro("top_logprobs", &token_score::top);

    bind_rows<prompt_event>(module, "PromptEvent",
                            "Rows of the prompt, scores of its tokens, or its embedding.")
        .def_ro("start", &prompt_event::start)
        .def_ro("n_rows", &prompt_event::n_rows)
        .def_prop_ro(
            "embedding",
            [](nb::handle_t<prompt_event> self) {
                auto& event = nb::cast<prompt_event&>(self);
                return embedding_array(event.embedding, event.n_rows, self);
            },
            nb::sig("def embedding(self) -> typing.Any"),
            "An array that belongs to the caller; None without embeds.")
        .def_ro("scores", &prompt_event::scores, nb::rv_policy::copy,
                "Of the tokens start .. start + n_rows; empty without n_scores.");

    nb::class_<wait_event>(module, "WaitEvent", "There is no event yet.")
        .def_ro("holders", &wait_event::holders,
                "Ids of the generations that hold every slot and wait for their consumers; empty "
                "if unchanged.");
}

}  // namespace

void bind_generation(nb::module_& module) {
    bind_events(module);
    nb::class_<shared_waiter>(module, "WakeHandle")
        .def(nb::init<>())
        .def(
            "fileno", [](const shared_waiter& self) { return self.handle->fd(); },
            "Descriptor that becomes readable when a generation has something; -1 on Windows.")
        .def(
            "wait",
            [](const shared_waiter& self) {
                const auto handle = self.handle;
                return unlocked([&] { return handle->wait(look_ms) == wait_end::is_set; });
            },
            "Block until a generation has something; False after a moment without.")
        .def(
            "drain", [](const shared_waiter& self) { self.handle->drain(); },
            "Clear the signal; check every waiting generation afterwards.");

    nb::class_<generation_handle>(module, "Generation")
        .def_prop_ro("id", [](const generation_handle& self) { return self.wanted->id; })
        .def_prop_ro(
            "slot", [](const generation_handle& self) { return self.wanted->slot.load(); },
            "Slot index; -1 while the request is queued.")
        .def_prop_ro(
            "is_parked",
            [](const generation_handle& self) {
                return self.wanted->slot.load() < 0 && self.wanted->box->n_ahead() > 0;
            },
            "True if it has no slot, and tokens that were not taken.")
        .def_prop_ro(
            "n_cached", [](const generation_handle& self) { return self.wanted->n_cached.load(); },
            "Prompt tokens that came from a cache; final before the first event.")
        .def("next", &next_item, nb::arg("wait_s") = nb::none(), nb::arg("goes_on") = false,
             nb::sig("def next(self, wait_s: float | None = None, goes_on: bool = False) "
                     "-> TokenEvent | PromptEvent | ForwardEvent | EndEvent | WaitEvent"),
             "Take the next event; blocks, without the GIL. Raises the error that ended the "
             "request.\n\nReturns a WaitEvent after wait_s, and while the request is queued if "
             "every slot waits\nfor its consumer. With `goes_on`, the latter only if the holders "
             "have changed.")
        .def("try_next", &try_next_item, nb::arg("goes_on") = false,
             nb::sig("def try_next(self, goes_on: bool = False) "
                     "-> TokenEvent | PromptEvent | ForwardEvent | EndEvent | WaitEvent"),
             "Like next(), without blocking.")
        .def(
            "arm",
            [](generation_handle& self, const shared_waiter& waiter) {
                self.core->sched().check_not_forked();
                return self.wanted->box->arm(waiter.handle);
            },
            nb::arg("waiter"), "Request a signal at the next event; True if there is one already.")
        .def(
            "arm_settled",
            [](generation_handle& self, const shared_waiter& waiter) {
                return self.core->sched().is_forked() ||
                       self.wanted->box->arm_settled(waiter.handle);
            },
            nb::arg("waiter"),
            "Request a signal when a cancellation has been carried out; True if it has.")
        .def(
            "disarm",
            [](generation_handle& self, const shared_waiter& waiter) {
                if (!self.core->sched().is_forked()) self.wanted->box->disarm(waiter.handle.get());
            },
            nb::arg("waiter"))
        .def(
            "cancel", [](generation_handle& self) { self.core->sched().cancel(self.wanted); },
            "Ask the engine to stop at the next step; returns at once.")
        .def("wait_settled", &wait_settled, "Wait until a cancellation has been carried out.")
        .def(
            "count_copied",
            [](generation_handle& self, std::size_t n_bytes) {
                self.core->sched().pool()->count_copied(n_bytes);
            },
            nb::arg("n_bytes"), "Add to the number of bytes copied out of views.")
        .def_prop_ro(
            "end",
            [](generation_handle& self) {
                if (!self.end && !self.core->sched().is_forked())
                    self.end = self.wanted->box->end();
                return self.end ? &*self.end : nullptr;
            },
            nb::rv_policy::copy, nb::sig("def end(self) -> EndEvent | None"),
            "None while the request runs; earlier events may not have been taken yet.");
}

}  // namespace kqview::bind
