// The exponential of a softmax, for vectors of floats of any width (gcc's and clang's vector
// types).
#pragma once

namespace kqview {

// exp(x) for x <= 0: 2^n * p(r), |r| <= ln2/2; coefficients of Cephes' expf. Error below 2 ulp.
// Below -87 it stays at 1.6e-38, which is negligible in a sum that contains exp(0).
template <class floats>
floats exp_nonpositive(floats x) {
    using integers = decltype(x < x);             // of the same width
    const floats magic = floats{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    x = x < -87.0f ? floats{} - 87.0f : x;
    const floats shifted = x * 1.44269504088896341f + magic;
    const floats n = shifted - magic;
    const floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    floats p = floats{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const integers power = reinterpret_cast<integers>(shifted) << 23;
    return reinterpret_cast<floats>(reinterpret_cast<integers>(p) + power);
}

}  // namespace kqview
