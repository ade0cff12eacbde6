// The comparison that decides whether a model is loaded at all, with made-up figures.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "memory/device_need.h"

using kqview::check_device_needs;
using kqview::device_need;
using kqview::errc;
using kqview::says_out_of_memory;

namespace {

constexpr std::size_t gib = std::size_t{1} << 30;

device_need need_of(std::size_t model_gib, std::size_t context_gib, std::size_t compute_gib,
                    std::size_t free_gib, std::string name = "CUDA0") {
    return {std::move(name),   model_gib * gib, context_gib * gib,
            compute_gib * gib, free_gib * gib,  80 * gib};
}

std::string refusal_of(const std::vector<device_need>& needs, int n_layers) {
    try {
        check_device_needs(needs, n_layers);
    } catch (const kqview::error& failure) {
        CHECK(failure.code() == errc::out_of_memory);
        return failure.what();
    }
    return "";
}

}  // namespace

TEST_CASE("device_need: what fits exactly is accepted, one byte more is not") {
    auto need = need_of(8, 2, 1, 11);
    CHECK(refusal_of({need}, 33).empty());
    need.compute_bytes += 1;
    CHECK_FALSE(refusal_of({need}, 33).empty());
}

TEST_CASE("device_need: the message has needed, free and what to lower") {
    const auto text = refusal_of({need_of(14, 2, 1, 9)}, 28);
    CHECK(text.find("CUDA0 needs 17.00 GiB") != std::string::npos);
    CHECK(text.find("weights 14.00 GiB, cache 2.00 GiB, compute 1.00 GiB") != std::string::npos);
    CHECK(text.find("9.00 GiB of 80.00 GiB are free") != std::string::npos);
    // (9 - 1) / 16 of the layers
    CHECK(text.find("n_gpu_layers to about 14") != std::string::npos);
    CHECK(text.find("kv_type") == std::string::npos);
}

TEST_CASE("device_need: less than a GiB is said in MiB") {
    device_need need{"CUDA0",   std::size_t{96} << 20, 1 << 20,
                     512 << 10, std::size_t{20} << 20, 2 * gib};
    const auto text = refusal_of({need}, 4);
    CHECK(text.find("CUDA0 needs 97.5 MiB (weights 96.0 MiB, cache 1.0 MiB, compute 0.5 MiB)") !=
          std::string::npos);
    CHECK(text.find("20.0 MiB of 2.00 GiB are free") != std::string::npos);
}

TEST_CASE("device_need: a cache larger than the weights suggests a smaller type of it") {
    CHECK(refusal_of({need_of(2, 14, 1, 9)}, 28).find("kv_type") != std::string::npos);
}

TEST_CASE("device_need: of several devices the one that is full is named") {
    const auto text = refusal_of({need_of(4, 1, 1, 40), need_of(4, 1, 1, 5, "CUDA1")}, 10);
    CHECK(text.find("CUDA1 needs") != std::string::npos);
    CHECK(text.find("about 8") != std::string::npos);
}

TEST_CASE("device_need: no layer fits where the compute buffers alone are too large") {
    CHECK(refusal_of({need_of(4, 1, 6, 5)}, 10).find("about 0") != std::string::npos);
}

TEST_CASE("device_need: a device that does not tell its memory is not judged") {
    auto need = need_of(4, 1, 1, 0);
    need.total_bytes = 0;
    CHECK(refusal_of({need}, 10).empty());
}

TEST_CASE("device_need: llama.cpp's words for memory that ran out are known") {
    CHECK(
        says_out_of_memory("allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory"));
    CHECK(says_out_of_memory("error loading model: unable to allocate CUDA0 buffer"));
    CHECK(says_out_of_memory("failed to allocate buffer for kv cache"));
    CHECK(says_out_of_memory("failed to allocate compute pp buffers"));
    CHECK(says_out_of_memory("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"));
    CHECK_FALSE(says_out_of_memory("error loading model: missing tensor 'output.weight'"));
    CHECK_FALSE(says_out_of_memory("K cache type q4_0 with block size 32 does not divide"));
    CHECK_FALSE(says_out_of_memory(""));
}
