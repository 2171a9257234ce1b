/* Colours that people who see few colours can tell apart: viridis, blue to orange, and the eight of Okabe and Ito. */

// Viridis (van der Walt, Smith; CC0), nine of its colours.
const VIRIDIS = [
  [68, 1, 84],
  [71, 44, 122],
  [59, 81, 139],
  [44, 113, 142],
  [33, 144, 141],
  [39, 173, 129],
  [92, 200, 99],
  [170, 220, 50],
  [253, 231, 37],
];
const BLUE_ORANGE = [
  [5, 72, 140],
  [47, 118, 184],
  [122, 176, 219],
  [196, 219, 236],
  [240, 240, 238],
  [250, 214, 170],
  [242, 165, 84],
  [214, 110, 25],
  [146, 62, 3],
];
// Okabe and Ito, without black and yellow, which vanish on dark or light ground.
const APART = [
  [0, 114, 178],
  [213, 94, 0],
  [0, 158, 115],
  [204, 121, 167],
  [86, 180, 233],
  [230, 159, 0],
  [120, 94, 240],
  [128, 128, 128],
];

/** Line patterns, so that no line is told by its colour alone. */
export const DASHES = [null, "6 3", "2 2", "9 3 2 3", "12 4", "1 3"];

function between(colors, share) {
  const place = Math.min(Math.max(share, 0), 1) * (colors.length - 1);
  const [low, part] = [Math.floor(place), place - Math.floor(place)];
  const high = Math.min(low + 1, colors.length - 1);
  return colors[low].map((value, n) => Math.round(value + part * (colors[high][n] - value)));
}

/** A share of 0 to 1 as [red, green, blue]: dark to light. */
export function sequential(share) {
  return between(VIRIDIS, share);
}

/** A share of -1 to 1 as [red, green, blue]: blue below zero, orange above. */
export function diverging(share) {
  return between(BLUE_ORANGE, (share + 1) / 2);
}

/** The colour of one of several things; after eight, lighter ones. */
export function apart(n) {
  const color = APART[n % APART.length];
  return n < APART.length ? color : color.map((value) => Math.round(value + 0.5 * (255 - value)));
}

/** [red, green, blue] for the CSSOM and for attributes. */
export function css(color) {
  return `rgb(${color.join(", ")})`;
}

/** Black or white, whichever is read better on a colour. */
export function ink(color) {
  const [red, green, blue] = color.map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#111" : "#fff";
}
