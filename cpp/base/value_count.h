// Counts the values of a JSON text or a MessagePack message before any object is made of them.
// Any thread, no GIL, linear in the bytes; does not check whether the input is well-formed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <vector>

namespace kqview {

struct value_counts {
    std::size_t n_values = 0;   // elements of lists and members of objects
    std::size_t n_members = 0;  // of which members of objects
    std::size_t depth = 0;      // most lists and objects around a value
};

// Commas and colons outside strings: each element but the first follows a comma.
inline value_counts count_json(std::string_view text) {
    value_counts counts;
    std::size_t depth = 0;
    bool in_string = false;
    for (std::size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (in_string) {
            if (c == '\\') {
                ++i;
            } else if (c == '"') {
                in_string = false;
            }
        } else if (c == '"') {
            in_string = true;
        } else {
            counts.n_values += c == ',' || c == '[' || c == '{';
            counts.n_members += c == ':';
            if (c == '[' || c == '{') counts.depth = std::max(counts.depth, ++depth);
            if ((c == ']' || c == '}') && depth > 0) --depth;
        }
    }
    return counts;
}

namespace detail {

inline std::size_t big_endian(std::string_view data, std::size_t at, std::size_t n_bytes) {
    std::size_t value = 0;
    for (std::size_t i = at; i < at + n_bytes && i < data.size(); ++i) {
        value = value << 8 | static_cast<unsigned char>(data[i]);
    }
    return value;
}

}  // namespace detail

// Heads one after another; what a list or map holds follows its head.
inline value_counts count_msgpack(std::string_view data) {
    value_counts counts;
    std::vector<std::size_t> n_due;  // values of each list and map that has not ended
    std::size_t i = 0;
    while (i < data.size()) {
        while (!n_due.empty() && n_due.back() == 0) n_due.pop_back();
        if (!n_due.empty()) --n_due.back();
        const auto head = static_cast<unsigned char>(data[i++]);
        std::size_t n_inside = 0;
        // Bytes of the head's length, and of what comes besides it.
        std::size_t n_length = 0;
        std::size_t n_skip = 0;
        ++counts.n_values;
        if (head >= 0x80 && head <= 0x8f) {
            counts.n_members += head & 0x0fU;
            n_inside = 2 * (head & 0x0fU);
        } else if (head >= 0x90 && head <= 0x9f) {
            n_inside = head & 0x0fU;
        } else if (head >= 0xa0 && head <= 0xbf) {
            n_skip = head & 0x1fU;
        } else if ((head >= 0xc4 && head <= 0xc6) || (head >= 0xd9 && head <= 0xdb)) {
            n_length = std::size_t{1} << (head >= 0xd9 ? head - 0xd9 : head - 0xc4);
            n_skip = detail::big_endian(data, i, n_length);
        } else if (head >= 0xc7 && head <= 0xc9) {
            n_length = std::size_t{1} << (head - 0xc7);
            n_skip = 1 + detail::big_endian(data, i, n_length);
        } else if (head == 0xca || head == 0xcb) {
            n_skip = head == 0xca ? 4 : 8;
        } else if (head >= 0xcc && head <= 0xd3) {
            n_skip = std::size_t{1} << ((head - 0xcc) % 4);
        } else if (head >= 0xd4 && head <= 0xd8) {
            n_skip = 1 + (std::size_t{1} << (head - 0xd4));
        } else if (head >= 0xdc && head <= 0xdf) {
            n_length = head % 2 == 0 ? 2 : 4;
            n_inside = detail::big_endian(data, i, n_length);
            if (head >= 0xde) counts.n_members += n_inside;
            if (head >= 0xde) n_inside *= 2;
        }
        if ((head >= 0x80 && head <= 0x9f) || (head >= 0xdc && head <= 0xdf)) {
            n_due.push_back(n_inside);
        }
        counts.depth = std::max(counts.depth, n_due.size());
        const std::size_t n_left = data.size() - i;
        if (n_length > n_left || n_skip > n_left - n_length) break;
        i += n_length + n_skip;
    }
    return counts;
}

}  // namespace kqview
