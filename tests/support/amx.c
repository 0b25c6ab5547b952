/* What the instructions of AMX do, for CPUs without it: one thread's tiles, multiplied element by element. */
#include <stdint.h>
#include <string.h>

enum { TILES = 8, ROWS = 16, WORDS = 16 };
static _Thread_local union {
  int32_t integers[ROWS][WORDS];
  float numbers[ROWS][WORDS];
  uint8_t bytes[ROWS][4 * WORDS];
  int8_t signed_bytes[ROWS][4 * WORDS];
  uint16_t halves[ROWS][2 * WORDS];
} tiles[TILES];
static _Thread_local int configured;

void emulated_ldtilecfg(const uint8_t *configuration) {
  configured = configuration[0] == 1;
  for (int tile = 0; tile < TILES; ++tile) {
    configured &= configuration[16 + 2 * tile] == 4 * WORDS && configuration[48 + tile] == ROWS;
  }
}

void emulated_tilerelease(void) { configured = 0, memset(tiles, 0x7f, sizeof tiles); }
void emulated_tilezero(int8_t tile) { memset(&tiles[tile], configured ? 0 : 0x7f, sizeof tiles[tile]); }

void emulated_tileloadd64(int8_t tile, const char *first, int64_t pitch) {
  for (int row = 0; row < ROWS; ++row) memcpy(tiles[tile].bytes[row], first + row * pitch, 4 * WORDS);
}

void emulated_tilestored64(int8_t tile, char *first, int64_t pitch) {
  for (int row = 0; row < ROWS; ++row) memcpy(first + row * pitch, tiles[tile].bytes[row], 4 * WORDS);
}

static float widened(uint16_t half) {
  const uint32_t bits = (half & 0x7f80) ? (uint32_t)half << 16 : (uint32_t)(half & 0x8000) << 16;
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

void emulated_tdpbf16ps(int8_t sums, int8_t data, int8_t filter) {
  for (int row = 0; row < ROWS; ++row) {
    for (int word = 0; word < WORDS; ++word) {
      for (int column = 0; column < WORDS; ++column) {
        const uint16_t *one = &tiles[data].halves[row][2 * word], *other = &tiles[filter].halves[word][2 * column];
        tiles[sums].numbers[row][column] += widened(one[0]) * widened(other[0]) + widened(one[1]) * widened(other[1]);
      }
    }
  }
}

#define PRODUCT(name, of_data, of_filter)                                                        \
  void emulated_##name(int8_t sums, int8_t data, int8_t filter) {                                \
    for (int row = 0; row < ROWS; ++row)                                                         \
      for (int word = 0; word < WORDS; ++word)                                                   \
        for (int column = 0; column < WORDS; ++column)                                           \
          for (int place = 0; place < 4; ++place)                                                \
            tiles[sums].integers[row][column] += tiles[data].of_data[row][4 * word + place] *    \
                                                 tiles[filter].of_filter[word][4 * column + place]; \
  }
PRODUCT(tdpbssd, signed_bytes, signed_bytes)
PRODUCT(tdpbsud, signed_bytes, bytes)
PRODUCT(tdpbusd, bytes, signed_bytes)
PRODUCT(tdpbuud, bytes, bytes)
