// SHA-256 (FIPS 180-4).
#ifndef TVM_DECONV_DETAIL_SHA256_HPP_
#define TVM_DECONV_DETAIL_SHA256_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tvm_deconv::detail {

class Sha256 {
 public:
  void update(std::string_view bytes) {
    length_ += bytes.size();
    for (char byte : bytes) put(static_cast<std::uint8_t>(byte));
  }

  // Ends the message; returns 32 bytes.
  std::array<std::uint8_t, 32> digest() {
    const std::uint64_t bits = 8 * length_;
    put(0x80);
    while (used_ != 56) put(0);
    for (int shift = 56; shift >= 0; shift -= 8) put(static_cast<std::uint8_t>(bits >> shift));
    std::array<std::uint8_t, 32> bytes{};
    for (std::size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    return bytes;
  }

 private:
  static std::uint32_t turned(std::uint32_t x, int by) { return x >> by | x << (32 - by); }

  void put(std::uint8_t byte) {
    block_[used_++] = byte;
    if (used_ == block_.size()) mix();
  }

  void mix() {
    static constexpr std::uint32_t k[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    std::uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
      w[i] = 0;
      for (int j = 0; j < 4; ++j) w[i] = w[i] << 8 | block_[static_cast<std::size_t>(4 * i + j)];
    }
    for (int i = 16; i < 64; ++i) {
      const std::uint32_t low = turned(w[i - 15], 7) ^ turned(w[i - 15], 18) ^ w[i - 15] >> 3;
      const std::uint32_t high = turned(w[i - 2], 17) ^ turned(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + low + w[i - 7] + high;
    }
    std::array<std::uint32_t, 8> s = state_;
    for (int i = 0; i < 64; ++i) {
      const std::uint32_t sum1 = turned(s[4], 6) ^ turned(s[4], 11) ^ turned(s[4], 25);
      const std::uint32_t first = s[7] + sum1 + ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
      const std::uint32_t sum0 = turned(s[0], 2) ^ turned(s[0], 13) ^ turned(s[0], 22);
      const std::uint32_t second = sum0 + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      s = {first + second, s[0], s[1], s[2], s[3] + first, s[4], s[5], s[6]};
    }
    for (std::size_t i = 0; i < state_.size(); ++i) state_[i] += s[i];
    used_ = 0;
  }

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::uint8_t, 64> block_{};
  std::size_t used_ = 0;
  std::uint64_t length_ = 0;
};

inline std::string bytes_of(const std::array<std::uint8_t, 32>& digest) { return {digest.begin(), digest.end()}; }

inline std::string hexadecimal(const std::array<std::uint8_t, 32>& digest) {
  std::string text;
  for (std::uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

inline std::array<std::uint8_t, 32> sha256(std::string_view bytes) {
  Sha256 hashed;
  hashed.update(bytes);
  return hashed.digest();
}

}  // namespace tvm_deconv::detail

#endif  // TVM_DECONV_DETAIL_SHA256_HPP_
