#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "sample/params.h"

namespace kqview::bind {

void bind_sampling(nb::module_& module) {
    nb::class_<sampling_params>(module, "SamplingParams")
        .def(nb::init<>())
        .def_rw("temperature", &sampling_params::temperature)
        .def_rw("top_k", &sampling_params::top_k)
        .def_rw("top_p", &sampling_params::top_p)
        .def_rw("min_p", &sampling_params::min_p)
        .def_rw("typical_p", &sampling_params::typical_p)
        .def_rw("repeat_penalty", &sampling_params::repeat_penalty)
        .def_rw("repeat_last_n", &sampling_params::repeat_last_n)
        .def_rw("presence_penalty", &sampling_params::presence_penalty)
        .def_rw("frequency_penalty", &sampling_params::frequency_penalty)
        .def_rw("dry_multiplier", &sampling_params::dry_multiplier)
        .def_rw("dry_base", &sampling_params::dry_base)
        .def_rw("dry_allowed_length", &sampling_params::dry_allowed_length)
        .def_rw("dry_penalty_last_n", &sampling_params::dry_penalty_last_n)
        .def_rw("dry_sequence_breakers", &sampling_params::dry_sequence_breakers)
        .def_rw("xtc_probability", &sampling_params::xtc_probability)
        .def_rw("xtc_threshold", &sampling_params::xtc_threshold)
        .def_rw("mirostat", &sampling_params::mirostat)
        .def_rw("mirostat_tau", &sampling_params::mirostat_tau)
        .def_rw("mirostat_eta", &sampling_params::mirostat_eta)
        .def_rw("seed", &sampling_params::seed, nb::arg().none())
        .def_rw("logit_bias", &sampling_params::logit_bias)
        .def_rw("banned_tokens", &sampling_params::banned_tokens)
        .def_rw("ignore_eos", &sampling_params::ignore_eos)
        .def_rw("grammar", &sampling_params::grammar)
        .def_rw("constraint_kind", &sampling_params::constraint_kind)
        .def_rw("constraint", &sampling_params::constraint)
        .def_rw("n_logprobs", &sampling_params::n_logprobs);
}

}  // namespace kqview::bind
