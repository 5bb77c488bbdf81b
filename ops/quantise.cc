// Quantising runs in two steps over pieces that stay in the first-level cache: comparisons leave a
// mask bit an element, in element order from the least significant bit, and the masks become codes
// a vector of bytes at a time. Nothing crosses lanes, so one body serves vectors of any width.
// AVX2, which has no mask registers, and whose moves of masks to general registers are slow on some
// processors, makes the codes of long runs in vectors (Quantise*Runs).
#include "ops/quantise.h"

#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>

#include <fmt/format.h>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantise.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include "ops/simd-inl.h"

#ifndef HEDDLE_OPS_QUANTISE_ONCE_
#define HEDDLE_OPS_QUANTISE_ONCE_
namespace heddle::ops {

// Elements of a piece: a whole number of words. Short two-bit pieces let the processor pack one
// while it waits for the memory of the next.
inline constexpr std::size_t kTwoBitPiece = 512;
inline constexpr std::size_t kOneBitPiece = 4096;

// The codes of four elements whose bits, first element lowest, are the index: `code` where the bit
// is set.
constexpr std::array<std::uint8_t, 16> MakeTwoBitTable(unsigned code) {
  std::array<std::uint8_t, 16> table = {};
  for (unsigned bits = 0; bits < 16; ++bits) {
    unsigned byte = 0;
    for (unsigned i = 0; i < 4; ++i) byte |= (bits >> i & 1U) * code << (6 - 2 * i);
    table[bits] = static_cast<std::uint8_t>(byte);
  }
  return table;
}
alignas(16) inline constexpr std::array<std::uint8_t, 16> kPlusCodes = MakeTwoBitTable(3);
alignas(16) inline constexpr std::array<std::uint8_t, 16> kMinusCodes = MakeTwoBitTable(2);

// Four bits in the reverse order.
constexpr std::array<std::uint8_t, 16> MakeReversed() {
  std::array<std::uint8_t, 16> table = {};
  for (unsigned bits = 0; bits < 16; ++bits) {
    for (unsigned i = 0; i < 4; ++i) {
      table[bits] = static_cast<std::uint8_t>(table[bits] | (bits >> i & 1U) << (3 - i));
    }
  }
  return table;
}
alignas(16) inline constexpr std::array<std::uint8_t, 16> kReversed = MakeReversed();

}  // namespace heddle::ops
#endif  // HEDDLE_OPS_QUANTISE_ONCE_

HWY_BEFORE_NAMESPACE();
namespace heddle::ops::HWY_NAMESPACE {

// No more lanes than a code word of two bits has elements.
using FloatTag = hn::CappedTag<float, 16>;
using ByteTag = hn::CappedTag<std::uint8_t, 16>;

// ---- Quantise

// Calls body(d, i) for vectors that cover [0, count); it returns kMasks masks, whose bits go to
// masks[0], masks[1] ...: (count + 7) / 8 bytes each, the last filled up with zeros.
template <std::size_t kMasks, class Body>
HWY_INLINE void ForEachMasked(std::size_t count, const std::array<std::uint8_t*, kMasks>& masks,
                              const Body& body) {
  const FloatTag d;
  const hn::CappedTag<float, 1> one;
  constexpr std::size_t kLanes = hn::MaxLanes(d);
  constexpr std::size_t kGroup = std::max<std::size_t>(kLanes, 8);
  std::size_t i = 0;
  if (hn::Lanes(d) == kLanes) {
    const auto run_group = [&](std::size_t begin) HWY_ATTR {
      std::array<unsigned, kMasks> few = {};  // vectors of fewer than 8 lanes
      for (std::size_t at = 0; at < kGroup; at += kLanes) {
        const auto found = body(d, begin + at);
        for (std::size_t m = 0; m < kMasks; ++m) {
          if constexpr (kLanes >= 8) {
            hn::StoreMaskBits(d, found[m], masks[m] + (begin + at) / 8);
          } else {
            std::uint8_t bits[8];
            hn::StoreMaskBits(d, found[m], bits);
            few[m] |= static_cast<unsigned>(bits[0]) << at;
          }
        }
      }
      if constexpr (kLanes < 8) {
        for (std::size_t m = 0; m < kMasks; ++m) {
          masks[m][begin / 8] = static_cast<std::uint8_t>(few[m]);
        }
      }
    };
    for (; i + 4 * kGroup <= count; i += 4 * kGroup) {
      run_group(i);
      run_group(i + kGroup);
      run_group(i + 2 * kGroup);
      run_group(i + 3 * kGroup);
    }
    for (; i + kGroup <= count; i += kGroup) run_group(i);
  }
  std::array<unsigned, kMasks> last = {};
  for (; i < count; ++i) {
    const auto found = body(one, i);
    for (std::size_t m = 0; m < kMasks; ++m) {
      last[m] |= static_cast<unsigned>(!hn::AllFalse(one, found[m])) << i % 8;
      if (i % 8 != 7 && i + 1 != count) continue;
      masks[m][i / 8] = static_cast<std::uint8_t>(last[m]);
      last[m] = 0;
    }
  }
}

// Two bytes of code for each byte of the masks.
HWY_INLINE void PackTwoBit(const std::uint8_t* plus, const std::uint8_t* minus, std::uint8_t* code,
                           std::size_t mask_bytes) {
  std::size_t i = 0;
#if HWY_TARGET != HWY_SCALAR  // which looks nothing up
  // A lane takes a byte of each mask.
  const auto pack = [&](auto d) HWY_ATTR {
    const hn::Rebind<std::uint8_t, decltype(d)> masks;
    const hn::Repartition<std::uint8_t, decltype(d)> codes;
    // The four low bits to the first byte, the four high ones to the second.
    const auto spread = [&](const std::uint8_t* mask) HWY_ATTR {
      const auto bits = hn::PromoteTo(d, hn::LoadU(masks, mask));
      return hn::BitCast(
          codes, hn::And(hn::Or(bits, hn::ShiftLeft<4>(bits)), hn::Set(d, std::uint16_t{0x0F0F})));
    };
    const auto p = hn::TableLookupBytes(hn::LoadDup128(codes, kPlusCodes.data()), spread(plus + i));
    const auto m =
        hn::TableLookupBytes(hn::LoadDup128(codes, kMinusCodes.data()), spread(minus + i));
    hn::StoreU(hn::Or(p, m), codes, code + 2 * i);
    i += hn::Lanes(d);
  };
  const hn::CappedTag<std::uint16_t, 32> wide;
  const hn::CappedTag<std::uint16_t, 8> narrow;
  while (i + hn::Lanes(wide) <= mask_bytes) pack(wide);
  while (i + hn::Lanes(narrow) <= mask_bytes) pack(narrow);
#endif
  for (; i < mask_bytes; ++i) {
    code[2 * i] = kPlusCodes[plus[i] & 15U] | kMinusCodes[minus[i] & 15U];
    code[2 * i + 1] = kPlusCodes[plus[i] >> 4U] | kMinusCodes[minus[i] >> 4U];
  }
}

// Masks to codes in place: the bits of each byte in the reverse order.
HWY_INLINE void PackOneBit(std::uint8_t* code, std::size_t bytes) {
  std::size_t i = 0;
  if constexpr (hn::MaxLanes(ByteTag()) == 16) {
    const ByteTag d;
    const auto reversed = hn::Load(d, kReversed.data());
    const auto low4 = hn::Set(d, std::uint8_t{15});
    for (; i + 16 <= bytes; i += 16) {
      const auto bits = hn::LoadU(d, code + i);
      const auto low = hn::TableLookupBytes(reversed, hn::And(bits, low4));
      const auto high = hn::TableLookupBytes(reversed, hn::ShiftRight<4>(bits));
      hn::StoreU(hn::Or(hn::ShiftLeft<4>(low), high), d, code + i);
    }
  }
  for (; i < bytes; ++i) {
    code[i] = static_cast<std::uint8_t>(kReversed[code[i] & 15U] << 4U | kReversed[code[i] >> 4U]);
  }
}

#if HWY_TARGET == HWY_AVX2
// Codes are made of bytes that say what is sent of an element, by narrowing four vectors: 0, or
// negative or positive as the lanes were. So narrowed, the first halves of the four vectors come
// before their second halves.
inline constexpr std::size_t kRun = 128;  // elements

// Calls step(i) for the vectors at [begin, begin + 32).
template <class Step>
HWY_INLINE __m256i NarrowToBytes(std::size_t begin, const Step& step) {
  __m256i lanes[4];
  for (std::size_t v = 0; v < 4; ++v) lanes[v] = step(begin + 8 * v);
  return _mm256_packs_epi16(_mm256_packs_epi32(lanes[0], lanes[1]),
                            _mm256_packs_epi32(lanes[2], lanes[3]));
}

// Quantises whole runs from the start. Returns the number of their elements.
template <typename T>
HWY_INLINE std::size_t QuantiseTwoBitRuns(float threshold, const T* gradient, float* residual,
                                          std::uint8_t* code, std::size_t count) {
  // A smaller one, below 1e-40, does not become the greatest byte.
  constexpr std::uint32_t kLeastBits = 0x8000;
  std::uint32_t threshold_bits;
  std::memcpy(&threshold_bits, &threshold, sizeof(threshold));
  if (threshold_bits < kLeastBits) return 0;

  const FloatTag d;
  const auto t = hn::Set(d, threshold);
  // Of what is sent, t, -t or 0, the bits.
  const auto step = [&](std::size_t i) HWY_ATTR {
    const auto sum = hn::Add(hn::LoadU(d, residual + i), LoadAs(d, gradient + i));
    const auto is_sent = hn::Ge(hn::Abs(sum), t);
    const auto sent = hn::IfThenElseZero(is_sent, hn::IfNegativeThenElse(sum, hn::Neg(t), t));
    hn::StoreU(hn::Sub(sum, sent), d, residual + i);
    return _mm256_castps_si256(sent.raw);
  };
  // A byte of code in each 32 bits, but for +t as 10 and -t as 11.
  const auto codes = [&](std::size_t i) HWY_ATTR {
    const __m256i symbols = _mm256_subs_epu8(NarrowToBytes(i, step), _mm256_set1_epi8(0x7D));
    const __m256i weights = _mm256_set1_epi32(0x01041040);
    return _mm256_madd_epi16(_mm256_maddubs_epi16(symbols, weights), _mm256_set1_epi16(1));
  };
  std::size_t i = 0;
  for (; i + kRun <= count; i += kRun) {
    __m256i parts[4];
    for (std::size_t p = 0; p < 4; ++p) parts[p] = codes(i + 32 * p);
    const __m256i halves = _mm256_packus_epi16(_mm256_packus_epi32(parts[0], parts[1]),
                                               _mm256_packus_epi32(parts[2], parts[3]));
    const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(halves, 1), _mm256_set1_epi8(0x55));
    const __m256i all = _mm256_xor_si256(halves, upper);
    const __m128i firsts = _mm256_castsi256_si128(all);
    const __m128i seconds = _mm256_extracti128_si256(all, 1);
    auto* const out = reinterpret_cast<__m128i*>(code + i / 4);
    _mm_storeu_si128(out, _mm_unpacklo_epi8(firsts, seconds));
    _mm_storeu_si128(out + 1, _mm_unpackhi_epi8(firsts, seconds));
  }
  return i;
}

template <typename T>
HWY_INLINE std::size_t QuantiseOneBitRuns(float threshold, const T* gradient, float* residual,
                                          std::uint8_t* code, std::size_t count) {
  const FloatTag d;
  const auto one = hn::Set(d, 1.0F);
  // -1 where a 1 is sent.
  const auto step = [&](std::size_t i) HWY_ATTR {
    const auto sum = hn::Add(hn::LoadU(d, residual + i), LoadAs(d, gradient + i));
    const auto is_plus = hn::Gt(sum, hn::Set(d, threshold));
    hn::StoreU(hn::Sub(sum, hn::IfThenElse(is_plus, one, hn::Neg(one))), d, residual + i);
    return _mm256_castps_si256(is_plus.raw);
  };
  // The upper and the lower four bits of a vector's code, in the lanes of its halves.
  const auto codes = [&](std::size_t i) HWY_ATTR {
    constexpr int kUpper = 0x10204080, kLower = 0x01020408;
    const __m256i weights =
        _mm256_setr_epi32(kUpper, kUpper, kUpper, kUpper, kLower, kLower, kLower, kLower);
    return _mm256_madd_epi16(_mm256_maddubs_epi16(weights, NarrowToBytes(i, step)),
                             _mm256_set1_epi16(-1));
  };
  const auto whole = [](__m256i a, __m256i b) HWY_ATTR {
    const __m256i halves = _mm256_packs_epi32(a, b);
    return _mm_add_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  };
  std::size_t i = 0;
  for (; i + kRun <= count; i += kRun) {
    __m256i parts[4];
    for (std::size_t p = 0; p < 4; ++p) parts[p] = codes(i + 32 * p);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(code + i / 8),
                     _mm_packus_epi16(whole(parts[0], parts[1]), whole(parts[2], parts[3])));
  }
  return i;
}
#endif

// The masks of one piece on their way to codes.
struct TwoBitMasks {
  HWY_ALIGN std::array<std::uint8_t, kTwoBitPiece / 8> plus;
  HWY_ALIGN std::array<std::uint8_t, kTwoBitPiece / 8> minus;
};

template <typename T>
HWY_INLINE void QuantiseTwoBitAs(float threshold, const T* gradient, float* residual,
                                 std::uint8_t* code, std::size_t count) {
  // A piece is packed after the comparisons of the next one: by then its masks, stored in bits and
  // pieces, can be loaded whole.
  std::array<TwoBitMasks, 2> pieces;
  std::size_t packed = 0;  // elements
  for (std::size_t begin = 0; begin < count; begin += kTwoBitPiece) {
    const std::size_t piece = std::min(kTwoBitPiece, count - begin);
    const T* const g = gradient + begin;
    float* const r = residual + begin;
    TwoBitMasks& masks = pieces[begin / kTwoBitPiece % 2];
    // Unless it gets elements:
    masks.plus[TwoBitCodeBytes(piece) / 2 - 1] = masks.minus[TwoBitCodeBytes(piece) / 2 - 1] = 0;
    ForEachMasked<2>(piece, {masks.plus.data(), masks.minus.data()},
                     [=](auto d, std::size_t i) HWY_ATTR {
                       const auto t = hn::Set(d, threshold);
                       const auto sum = hn::Add(hn::LoadU(d, r + i), LoadAs(d, g + i));
                       const auto is_plus = hn::Ge(sum, t);
                       const auto is_minus = hn::Le(sum, hn::Neg(t));
                       const auto lower = hn::IfThenElse(is_plus, hn::Sub(sum, t), sum);
                       hn::StoreU(hn::IfThenElse(is_minus, hn::Add(sum, t), lower), d, r + i);
                       return std::array{is_plus, is_minus};
                     });
    if (begin != 0) {
      const TwoBitMasks& before = pieces[(begin / kTwoBitPiece + 1) % 2];
      PackTwoBit(before.plus.data(), before.minus.data(), code + packed / 4, kTwoBitPiece / 8);
      packed = begin;
    }
  }
  if (count == 0) return;
  const TwoBitMasks& last = pieces[packed / kTwoBitPiece % 2];
  PackTwoBit(last.plus.data(), last.minus.data(), code + packed / 4,
             TwoBitCodeBytes(count - packed) / 2);
}

template <typename T>
HWY_INLINE void QuantiseOneBitAs(float threshold, const T* gradient, float* residual,
                                 std::uint8_t* code, std::size_t count) {
  for (std::size_t begin = 0; begin < count; begin += kOneBitPiece) {
    const std::size_t piece = std::min(kOneBitPiece, count - begin);
    const std::size_t code_bytes = OneBitCodeBytes(piece);
    const T* const g = gradient + begin;
    float* const r = residual + begin;
    std::uint8_t* const bits = code + begin / 8;
    std::memset(bits + code_bytes - 4, 0, 4);  // unless they get elements
    ForEachMasked<1>(piece, {bits}, [=](auto d, std::size_t i) HWY_ATTR {
      const auto one = hn::Set(d, 1.0F);
      const auto sum = hn::Add(hn::LoadU(d, r + i), LoadAs(d, g + i));
      const auto is_plus = hn::Gt(sum, hn::Set(d, threshold));
      hn::StoreU(hn::Sub(sum, hn::IfThenElse(is_plus, one, hn::Neg(one))), d, r + i);
      return std::array{is_plus};
    });
    PackOneBit(bits, code_bytes);
  }
}

// gradient: float32, float16 or bfloat16.
template <class Quantise>
HWY_INLINE void OnGradient(DType dtype, const void* gradient, const Quantise& quantise) {
  if (dtype == DType::kFloat32) {
    quantise(static_cast<const float*>(gradient));
  } else if (dtype == DType::kFloat16) {
    quantise(static_cast<const Float16*>(gradient));
  } else {
    quantise(static_cast<const BFloat16*>(gradient));
  }
}

void QuantiseTwoBitForTarget(float threshold, DType dtype, const void* gradient, float* residual,
                             void* code, std::size_t count) {
  OnGradient(dtype, gradient, [=](const auto* g) HWY_ATTR {
    auto* const codes = static_cast<std::uint8_t*>(code);
    std::size_t run = 0;
#if HWY_TARGET == HWY_AVX2
    run = QuantiseTwoBitRuns(threshold, g, residual, codes, count);
#endif
    QuantiseTwoBitAs(threshold, g + run, residual + run, codes + run / 4, count - run);
  });
}

void QuantiseOneBitForTarget(float threshold, DType dtype, const void* gradient, float* residual,
                             void* code, std::size_t count) {
  OnGradient(dtype, gradient, [=](const auto* g) HWY_ATTR {
    auto* const codes = static_cast<std::uint8_t*>(code);
    std::size_t run = 0;
#if HWY_TARGET == HWY_AVX2
    run = QuantiseOneBitRuns(threshold, g, residual, codes, count);
#endif
    QuantiseOneBitAs(threshold, g + run, residual + run, codes + run / 8, count - run);
  });
}

// ---- Dequantise

// Sets out[i] to value(bits), for kWord elements a word of code: `bits` has the element's code in
// its most significant bits, a lane an element.
template <std::size_t kBits, bool kStreamed, class Value>
HWY_INLINE void DecodeWords(const std::uint8_t* code, float* out, std::size_t count,
                            const Value& value) {
  constexpr std::size_t kWord = 32 / kBits;
  constexpr std::size_t kPerByte = 8 / kBits;
  constexpr std::size_t kPrefetchBytes = 512;
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  constexpr std::size_t kLanes = hn::MaxLanes(d);
  // Element i of a word lies in byte i / kPerByte, and in there from the top.
  alignas(64) std::array<std::uint32_t, kWord> shifts;
  for (std::size_t i = 0; i < kWord; ++i) {
    const std::size_t below = 8 * (i / kPerByte) + 8 - kBits * (i % kPerByte);
    shifts[i] = static_cast<std::uint32_t>(32 - below);
  }
  std::size_t i = 0;
  if (hn::Lanes(d) == kLanes) {
    // Stores of whole cache lines in a row, apart from the loads.
    constexpr std::size_t kWords = 128 / kWord;
    constexpr std::size_t kVectors = kWord / kLanes;
    const auto decode_words = [&](auto words, std::size_t begin) HWY_ATTR {
      // The codes advance too slowly for the processor to foresee that it needs the next line.
      hwy::Prefetch(code + begin / kPerByte + kPrefetchBytes);
      hn::Vec<FloatTag> values[words * kVectors];
      for (std::size_t w = 0; w < words; ++w) {
        std::uint32_t word;
        std::memcpy(&word, code + (begin + w * kWord) / kPerByte, sizeof(word));
        const auto all = hn::Set(du, word);
        for (std::size_t v = 0; v < kVectors; ++v) {
          const auto bits = hn::Shl(all, hn::Load(du, shifts.data() + v * kLanes));
          values[w * kVectors + v] = value(d, bits);
        }
      }
      for (std::size_t v = 0; v < words * kVectors; ++v) {
        StoreLanes<kStreamed>(values[v], d, out + begin + v * kLanes);
      }
    };
    constexpr std::size_t kRunCount = kWords * kWord;
    for (; i + kRunCount <= count; i += kRunCount) {
      decode_words(std::integral_constant<std::size_t, kWords>(), i);
    }
    for (; i + kWord <= count; i += kWord) {
      decode_words(std::integral_constant<std::size_t, 1>(), i);
    }
  }
  if (kStreamed) hwy::FlushStream();
  const hn::CappedTag<float, 1> one;
  const hn::RebindToUnsigned<decltype(one)> one_bits;
  for (; i < count; ++i) {
    const std::uint32_t byte = code[i / kPerByte];
    const auto bits = hn::Set(one_bits, byte << (24 + kBits * (i % kPerByte)));
    StoreLanes<false>(value(one, bits), one, out + i);
  }
}

template <std::size_t kBits, class Value>
HWY_INLINE void Decode(const std::uint8_t* code, float* out, std::size_t count, bool streamed,
                       const Value& value) {
  // Small vectors cannot be streamed.
  const bool can_stream =
      hn::MaxLanes(FloatTag()) >= 4 && reinterpret_cast<std::uintptr_t>(out) % 64 == 0;
  if (streamed && can_stream) {
    DecodeWords<kBits, true>(code, out, count, value);
  } else {
    DecodeWords<kBits, false>(code, out, count, value);
  }
}

void DequantiseTwoBitForTarget(float threshold, const std::uint8_t* code, float* out,
                               std::size_t count, bool streamed) {
  // By code, again and again; 1 is never sent.
  alignas(64) std::array<float, 16> by_code = {};
  for (std::size_t i = 0; i < by_code.size(); i += 4) {
    by_code[i + 2] = -threshold;
    by_code[i + 3] = threshold;
  }
  Decode<2>(code, out, count, streamed, [&by_code, threshold](auto d, auto bits) HWY_ATTR {
#if HWY_TARGET == HWY_AVX2
    // Looks up by the two low bits of a lane, and within four lanes, where it is twice as fast.
    if constexpr (hn::MaxLanes(d) == 8) {
      const auto table = hn::Load(d, by_code.data());
      return hn::Vec<decltype(d)>{_mm256_permutevar_ps(table.raw, hn::ShiftRight<30>(bits).raw)};
    }
#endif
    const hn::RebindToSigned<decltype(d)> di;
    if constexpr (hn::MaxLanes(d) >= 4) {
      const auto codes = hn::BitCast(di, hn::ShiftRight<30>(bits));
      return hn::TableLookupLanes(hn::Load(d, by_code.data()), hn::IndicesFromVec(d, codes));
    }
    const auto sign = hn::SignBit(d);
    const auto sent = hn::BroadcastSignBit(hn::BitCast(di, bits));  // all ones, or zero
    const auto is_plus = hn::And(hn::BitCast(d, hn::Add(bits, bits)), sign);
    return hn::And(hn::BitCast(d, sent), hn::Xor(hn::Set(d, -threshold), is_plus));
  });
}

void DequantiseOneBitForTarget(const std::uint8_t* code, float* out, std::size_t count,
                               bool streamed) {
  Decode<1>(code, out, count, streamed, [](auto d, auto bits) HWY_ATTR {
    return hn::Xor(hn::Set(d, -1.0F), hn::And(hn::BitCast(d, bits), hn::SignBit(d)));
  });
}

}  // namespace heddle::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle::ops {

HWY_EXPORT(QuantiseTwoBitForTarget);
HWY_EXPORT(QuantiseOneBitForTarget);
HWY_EXPORT(DequantiseTwoBitForTarget);
HWY_EXPORT(DequantiseOneBitForTarget);

namespace {

void RequireGradient(DType dtype) {
  if (dtype != DType::kFloat32 && dtype != DType::kFloat16 && dtype != DType::kBFloat16) {
    throw InvalidArgument(
        fmt::format("quantise: expected float32, float16 or bfloat16, got {}", Name(dtype)));
  }
}

// Calls decode(begin, count, streamed) for parts that together are `count` elements. Almost all
// that decoding moves is its output, which ordinary stores read before they overwrite it, unless a
// cache has it. Of an output of about the caches' size that is for others to decide, too, who share
// the cache: one part is decoded either way, and what was faster does the rest. Measured, with 32
// MiB of L3: of 16 MiB ordinary stores go at 53 to 60 GB/s and streaming ones at 30 on a Zen 4, at
// 25 and 44 on a Zen 5 with busy neighbours; of 4 MiB ordinary ones are twice as fast, of 64 MiB
// streaming ones by a third.
template <class Decode>
void DecodeInParts(StoreMode mode, std::size_t count, const Decode& decode) {
  constexpr std::size_t kTriedFrom = std::size_t{12} << 20, kStreamedFrom = std::size_t{32} << 20;
  const std::size_t bytes = count * sizeof(float);
  if (mode == StoreMode::kAuto && bytes < kTriedFrom) mode = StoreMode::kCached;
  if (mode == StoreMode::kAuto && bytes >= kStreamedFrom) mode = StoreMode::kStreaming;
  if (mode != StoreMode::kAuto) return decode(0, count, mode == StoreMode::kStreaming);
  constexpr std::size_t kTried = std::size_t{128} << 10;  // elements, cuts at whole bytes of code
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  decode(0, kTried, false);
  const Clock::time_point middle = Clock::now();
  decode(kTried, kTried, true);
  const bool streamed = Clock::now() - middle < middle - start;
  decode(2 * kTried, count - 2 * kTried, streamed);
}

}  // namespace

void QuantiseTwoBit(float threshold, DType dtype, const void* gradient, float* residual, void* code,
                    std::size_t count) {
  RequireGradient(dtype);
  HWY_DYNAMIC_DISPATCH(QuantiseTwoBitForTarget)(threshold, dtype, gradient, residual, code, count);
}

void QuantiseOneBit(float threshold, DType dtype, const void* gradient, float* residual, void* code,
                    std::size_t count) {
  RequireGradient(dtype);
  HWY_DYNAMIC_DISPATCH(QuantiseOneBitForTarget)(threshold, dtype, gradient, residual, code, count);
}

void DequantiseTwoBit(float threshold, const void* code, float* out, std::size_t count,
                      StoreMode mode) {
  const auto* const codes = static_cast<const std::uint8_t*>(code);
  DecodeInParts(mode, count, [=](std::size_t begin, std::size_t part, bool streamed) {
    HWY_DYNAMIC_DISPATCH(DequantiseTwoBitForTarget)
    (threshold, codes + begin / 4, out + begin, part, streamed);
  });
}

void DequantiseOneBit(const void* code, float* out, std::size_t count, StoreMode mode) {
  const auto* const codes = static_cast<const std::uint8_t*>(code);
  DecodeInParts(mode, count, [=](std::size_t begin, std::size_t part, bool streamed) {
    HWY_DYNAMIC_DISPATCH(DequantiseOneBitForTarget)
    (codes + begin / 8, out + begin, part, streamed);
  });
}

}  // namespace heddle::ops
#endif  // HWY_ONCE
