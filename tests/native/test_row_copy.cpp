// Copies of rows: the same bytes at the same places, in as few calls as the layout allows.
#include <doctest/doctest.h>

#include <cstddef>
#include <numeric>
#include <vector>

#include "tap/device/row_copy.h"

using kqview::add_copy;
using kqview::pack_copies;
using kqview::row_copy;

namespace {

constexpr std::size_t row_bytes = 3;
constexpr std::size_t n_cells = 5;  // bytes from one row of the device to the next

struct fixture {
    std::vector<unsigned char> device = std::vector<unsigned char>(4096);
    std::vector<std::byte> host = std::vector<std::byte>(4096);
    fixture() { std::iota(device.begin(), device.end(), static_cast<unsigned char>(1)); }

    // Rows of `heads` of each layer of a step of n_slots slots, as device_copies asks for them.
    std::vector<row_copy> of_slot(std::size_t slot, std::size_t n_slots, std::size_t n_layers,
                                  std::size_t n_head, const std::vector<std::size_t>& heads) {
        std::vector<row_copy> copies;
        auto* to = host.data();
        for (std::size_t layer = 0; layer < n_layers; ++layer) {
            for (const auto head : heads) {
                const auto row = (layer * n_slots + slot) * n_head + head;
                add_copy(copies, {row * n_cells, to, 1, row_bytes, n_cells, row_bytes});
                to += row_bytes;
            }
        }
        return copies;
    }

    std::vector<std::byte> carried_out(const std::vector<row_copy>& copies) {
        std::vector<std::byte> there(host.size());
        for (const auto& one : copies) {
            CHECK((one.n_rows == 1 || one.from_stride >= one.row_bytes));
            CHECK((one.n_rows == 1 || one.to_stride >= one.row_bytes));
            for (std::size_t i = 0; i < one.n_rows; ++i) {
                for (std::size_t b = 0; b < one.row_bytes; ++b) {
                    const auto at = static_cast<std::size_t>(one.to - host.data());
                    there[at + i * one.to_stride + b] =
                        std::byte{device[one.from + i * one.from_stride + b]};
                }
            }
        }
        return there;
    }

    std::size_t n_packed(std::vector<row_copy> copies) {
        const auto before = carried_out(copies);
        pack_copies(copies);
        CHECK(carried_out(copies) == before);
        return copies.size();
    }
};

const std::vector<std::size_t> all{0, 1, 2, 3};

}  // namespace

TEST_CASE_FIXTURE(fixture, "row_copy: rows of one slot that follow each other are one copy") {
    CHECK(n_packed(of_slot(0, 1, 6, 4, all)) == 1);
}

TEST_CASE_FIXTURE(fixture, "row_copy: a slot among others has a copy for each head or each layer") {
    for (std::size_t slot = 0; slot < 3; ++slot) {
        CHECK(n_packed(of_slot(slot, 3, 6, 4, all)) == 4);
        CHECK(n_packed(of_slot(slot, 3, 3, 4, all)) == 3);
        CHECK(n_packed(of_slot(slot, 3, 6, 1, {0})) == 1);
    }
}

TEST_CASE_FIXTURE(fixture, "row_copy: chosen heads of all layers are a copy each") {
    CHECK(n_packed(of_slot(0, 1, 6, 4, {3, 0})) == 2);
    CHECK(n_packed(of_slot(1, 2, 6, 8, {6, 2, 3, 0})) == 4);
    CHECK(n_packed(of_slot(0, 1, 2, 8, {6, 2, 0})) == 3);
}

TEST_CASE_FIXTURE(fixture, "row_copy: what has no pattern stays as it is") {
    auto copies = of_slot(0, 1, 6, 4, {3, 0});
    copies[7].from += 1;
    CHECK(n_packed(copies) == copies.size());
    copies = of_slot(0, 1, 6, 4, {3, 0});
    copies.pop_back();
    CHECK(n_packed(copies) == copies.size());
    // Layers asked for from the last to the first: distances of copies do not go backwards.
    std::vector<row_copy> backwards;
    for (std::size_t i = 0; i < 4; ++i) {
        backwards.push_back(
            {(4 - i) * 40, host.data() + i * row_bytes, 1, row_bytes, n_cells, row_bytes});
    }
    CHECK(n_packed(backwards) == 4);
    CHECK(n_packed({}) == 0);
}
