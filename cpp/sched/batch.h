// The next step, as it is filled: its tokens, whose they are, and where their rows go.
// Owner:   the batch builder.
// Threads: the engine thread.
#pragma once

#include <cstddef>
#include <vector>

#include "base/ids.h"
#include "sched/runner.h"
#include "sched/slot_table.h"

namespace kqview {

// One slot's part of a step.
struct batch_part {
    slot* target;
    int n_tokens;
    int n_rows;             // its last tokens whose rows are captured as prompt rows
    bool samples;           // the logits of its last token are wanted
    bool is_last;           // no prompt tokens remain after it
    int i_token = 0;        // index of its last token in the batch, guesses aside
    bool is_ahead = false;  // its token is the likely answer of its consumer (slot::likely)

    // True if the request ends with its prompt, and so with this step.
    bool is_end() const { return is_last && !samples; }
    // False: it has the last token of a text that goes on.
    bool is_prompt() const {
        return !is_ahead && (n_tokens > 1 || !samples || target->usage.completion_tokens == 0);
    }
    bool ends_embedding() const { return is_end() && target->active->embeds; }
};

// A step: its tokens, and where their rows go.
struct batch {
    std::vector<step_token> tokens;
    std::vector<step_rows> rows;
    std::vector<batch_part> parts;
    // Of each part, tokens behind its own: guesses (slot::draft), and what fills the run up.
    std::size_t n_guessed = 0;
};

}  // namespace kqview
