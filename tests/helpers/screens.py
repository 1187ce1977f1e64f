"""Checks a page in a browser, at several widths and colour schemes, for text that is cut off or too faint to read."""

from helpers.browser import Browser


def look_at(browser: Browser, width: int, scheme: str) -> None:
    browser.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.devtools("Emulation.setDeviceMetricsOverride", **size)


CUT = """
const wide = document.documentElement.clientWidth;
return [...document.querySelectorAll(arguments[0])].filter(one => one.checkVisibility()).filter(one => {
  const box = one.getBoundingClientRect();
  const isClipped = one.clientWidth && one.scrollWidth > one.clientWidth + 1;
  return box.left < 0 || box.right > wide || box.width === 0 || isClipped;
}).map(one => one.className);
"""

# The contrast of each text with its background (WCAG 2.2, 1.4.3). A canvas converts colours of any colour space to
# sRGB.
CONTRAST = """
const brush = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const rgba = colour => {
  brush.clearRect(0, 0, 1, 1); brush.fillStyle = colour; brush.fillRect(0, 0, 1, 1);
  return [...brush.getImageData(0, 0, 1, 1).data];
};
const over = (top, under) => top.slice(0, 3).map((one, at) => (one * top[3] + under[at] * (255 - top[3])) / 255);
const behind = one => {
  const stack = [];
  for (; one; one = one.parentElement) stack.push(rgba(getComputedStyle(one).backgroundColor));
  return stack.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
};
const light = rgb => {
  const [r, g, b] = rgb.map(one => one / 255).map(one => one <= .04045 ? one / 12.92 : ((one + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
};
const faint = [];
for (const one of document.querySelectorAll('body *')) {
  const isText = [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim());
  if (!isText || !one.checkVisibility()) continue;
  const fill = one.parentElement?.matches('.bar > .owned') && one.parentElement.querySelector('.fill');
  for (const ground of fill ? [one, fill] : [one]) {
    const under = behind(ground), text = over(rgba(getComputedStyle(one).color), under);
    const [more, less] = [light(text), light(under)].sort((a, b) => b - a);
    const ratio = (more + .05) / (less + .05);
    if (ratio < 4.5) faint.push(`${one.className} ${one.innerText}: ${ratio.toFixed(2)}`);
  }
}
return faint;
"""
